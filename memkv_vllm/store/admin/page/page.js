// The status page: asks this server every two seconds and draws what it says. Text is only ever set as text.
"use strict";

const STEP_MS = 2000, TIMEOUT_MS = 5000, MAX_ROWS = 1800, MAX_TABLE_ROWS = 200;
const SPACES_EVERY = 5;  // rounds: a list of thousands costs the server some 20 ms, which its clients wait for
const $ = (id) => document.getElementById(id);
let rows = [], columns = [], boot = null, lastSeen = null, cursor = null, spaces = [], rounds = 0;

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

// ------------------------------------------------------------------ numbers for people

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${number < 10 && unit ? number.toFixed(2) : number < 100 && unit ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function rate(number) {  // network people count in powers of ten
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number < 10 && unit ? number.toFixed(2) : number < 100 && unit ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function duration(seconds) {
  seconds = Math.max(0, Math.round(seconds));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const percent = (part) => part === null ? "–" : `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
const count = (number) => number.toLocaleString("en-US");
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

// ------------------------------------------------------------------ asking

async function ask(path) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch(path, {signal: abort.signal, cache: "no-store"});
    if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
    return await answer.json();
  } finally {
    clearTimeout(timer);
  }
}

async function follow(status) {
  const last = rows.length ? rows[rows.length - 1] : null;
  const known = boot === status.server.boot_id && last !== null;
  if (!known || status.sample[0] - last[0] > 2.5 * status.step_s) {
    // First sight, a restart (counters begin anew) or a gap in which this page slept.
    const history = await ask("/v1/history");
    boot = status.server.boot_id;
    columns = history.columns;
    rows = history.rows;
  } else if (status.sample[0] > last[0]) {
    rows.push(status.sample);
  }
  if (rows.length > MAX_ROWS) rows = rows.slice(-MAX_ROWS);
}

async function round() {
  try {
    const status = await ask("/v1/status");
    if (status.server === undefined) {
      showState("wait", "starting", status.admin.details);
    } else {
      if (rounds % SPACES_EVERY === 0) spaces = (await ask("/v1/namespaces")).namespaces;
      rounds += 1;
      await follow(status);
      lastSeen = Date.now();
      show(status, spaces);
    }
  } catch (error) {
    const since = lastSeen === null ? "" : ` Last answer at ${clock(lastSeen / 1000)}; what stands below is from then.`;
    showState("unreachable", "server unreachable", [
      {detail: "server unreachable", next_step: `It does not answer (${error.message}).${since} This page tries again by itself.`},
    ]);
    $("content").className = "old";
    rounds = 0;
  }
  setTimeout(round, STEP_MS);
}

async function roundServers() {  // by itself: a server that hangs holds up its row and nothing else of the page
  try {
    showServers((await ask("/v1/servers")).servers);
  } catch (error) {
    $("servers-note").textContent = `not known at present (${error.message})`;
  }
  setTimeout(roundServers, STEP_MS);
}

// ------------------------------------------------------------------ showing

function showState(state, text, details) {
  $("state").dataset.state = state;
  $("state").textContent = text;
  document.title = state === "ok" ? "memkv" : `memkv: ${text}`;
  $("notices").replaceChildren(...details.map((reason) => {
    const notice = make("p", undefined, `notice ${state === "unreachable" ? "bad" : "warn"}`);
    notice.append(make("b", reason.detail), reason.next_step);
    return notice;
  }));
}

function show(status, namespaces) {
  const {server, admin, arena, table, rates} = status, disk = status.disk || {};
  showState(admin.healthy ? "ok" : "degraded", admin.healthy ? "ok" : admin.reasons.join(", "), admin.details);
  $("content").hidden = false;
  $("content").className = "";
  $("where").textContent = location.host;
  $("about").textContent = `version ${admin.version}, up ${duration(server.uptime_s)}, store ${server.server_id.slice(0, 8)}`;
  const asked = rates.hits_per_s + rates.misses_per_s;
  const tiles = [
    ["In (put)", rate(rates.put_bytes_per_s), `${bytes(status.counters.put_bytes || 0)} in all`],
    ["Out (get)", rate(rates.get_bytes_per_s), `${bytes(status.counters.get_bytes || 0)} in all`],
    ["Hit ratio, 10 s", percent(asked ? rates.hits_per_s / asked : null), `${Math.round(asked)} values/s asked`],
    ["Arena", percent(arena.used / arena.size), `${bytes(arena.used)} of ${bytes(arena.size)}`],
  ];
  if (disk.size_bytes) {
    tiles.push(["Disk", percent(disk.used_bytes / disk.size_bytes), `${bytes(disk.used_bytes)} of ${bytes(disk.size_bytes)}`]);
  }
  tiles.push(
    ["Values", count(table.complete), `${bytes(table.bytes_used)}`],
    ["Evictions", `${rates.evictions_per_s.toFixed(1)} /s`, `${count(table.counters.evictions)} in all`],
    ["Sessions", count(server.sessions), `${count(server.inflight)} requests in flight`],
    ["Loop lag, 30 s", `${(1000 * admin.lag_s).toFixed(0)} ms`, "the most"],
  );
  $("tiles").replaceChildren(...tiles.map(([name, value, note]) => {
    const tile = make("div", undefined, "tile");
    tile.append(make("span", name), make("b", value), make("i", note));
    return tile;
  }));
  drawAll();
  showTables(status, namespaces);
}

function fillTable(id, heads, lines, none) {
  const head = make("tr");
  head.append(...heads.map((name) => make("th", name)));
  const body = lines.map((line) => {
    const row = make("tr");
    row.append(...line.map((cell, at) => make("td", cell, at === 0 ? "code" : "")));
    return row;
  });
  if (!body.length) {
    const row = make("tr"), cell = make("td", none, "none");
    cell.colSpan = heads.length;
    row.append(cell);
    body.push(row);
  }
  $(id).replaceChildren(head, ...body);
}

function showServers(servers) {
  const known = (value, format) => value === null ? "–" : format(value);
  const filling = (used, size) => used === null ? "–" : `${bytes(used)} of ${bytes(size)}`;
  $("servers-note").textContent = servers.length > 1 ? `${servers.filter((row) => row.state === "ok").length} of ${servers.length} ok`
    : "network.admin_peers names no others";
  fillTable("servers", ["server", "state", "up", "values", "arena", "disk", "hit ratio, 10 s", "in (put)", "out (get)", "sessions"],
    servers.map((row) => [
      row.is_this ? `${location.host} (this one)` : row.address, row.reason ? `${row.state}: ${row.reason}` : row.state,
      known(row.uptime_s, duration), known(row.values, count), filling(row.arena_used_bytes, row.arena_size_bytes),
      filling(row.disk_used_bytes, row.disk_size_bytes), percent(row.hit_ratio), known(row.put_bytes_per_s, rate),
      known(row.get_bytes_per_s, rate), known(row.sessions, count),
    ]), "none");
  servers.forEach((row, at) => { $("servers").rows[at + 1].cells[1].dataset.state = row.state; });
}

function showTables(status, namespaces) {
  const shown = (all) => all.length > MAX_TABLE_ROWS ? `the first ${MAX_TABLE_ROWS} of ${count(all.length)}` : "";
  $("namespaces-note").textContent = shown(namespaces);
  fillTable("namespaces", ["namespace", "values", "arena", "disk", "idle"],
    namespaces.slice(0, MAX_TABLE_ROWS).map((space) => [
      space.namespace, count(space.values), bytes(space.arena_bytes), bytes(space.disk_bytes),
      duration(space.idle_s),
    ]), "none yet: engines add theirs when they connect");
  const keys = new Map();
  for (const session of status.sessions) {
    const sum = keys.get(session.key_id) || {sessions: 0, requests: 0, put: 0, get: 0};
    sum.sessions += 1;
    sum.requests += session.requests;
    sum.put += session.put_bytes;
    sum.get += session.get_bytes;
    keys.set(session.key_id, sum);
  }
  fillTable("keys", ["key id", "sessions", "requests", "put", "get"],
    [...keys].map(([key, sum]) => [key, count(sum.sessions), count(sum.requests), bytes(sum.put), bytes(sum.get)]),
    "no session is open");
  $("sessions-note").textContent = shown(status.sessions);
  fillTable("sessions", ["peer", "key id", "kind", "bytes over", "in flight", "requests", "put", "get"],
    status.sessions.slice(0, MAX_TABLE_ROWS).map((session) => [
      session.peer, session.key_id, session.kind, session.data_path, count(session.inflight), count(session.requests),
      bytes(session.put_bytes), bytes(session.get_bytes),
    ]), "no session is open");
  const plain = /^(connections|disk_hits|sessions|sessions_closed|requests_(?!refused).*|(put|get)_(ok|exists|absent|bytes))$/;
  const events = Object.entries(status.counters).filter(([name, number]) => number && !plain.test(name)).sort();
  fillTable("events", ["event", "count"], events.map(([name, number]) => [name, count(number)]), "nothing");
}

// ------------------------------------------------------------------ charts

const at = (row, name) => row[columns.indexOf(name)];

function perSecond(name) {
  return rows.slice(1).map((row, index) => {
    const before = rows[index], elapsed = row[0] - before[0];
    return [row[0], elapsed > 0 ? Math.max(0, at(row, name) - at(before, name)) / elapsed : 0];
  });
}

function hitRatio() {
  return rows.slice(1).map((row, index) => {
    const hits = at(row, "hits") - at(rows[index], "hits"), misses = at(row, "misses") - at(rows[index], "misses");
    return [row[0], hits + misses > 0 ? hits / (hits + misses) : null];
  });
}

const filled = (used, size) => rows.map((row) => [row[0], at(row, size) ? at(row, used) / at(row, size) : null]);

function drawAll() {
  draw("traffic", [["in", perSecond("put_bytes")], ["out", perSecond("get_bytes")]], rate, null);
  draw("ratio", [["hit ratio", hitRatio()]], percent, 1);
  const series = [["arena", filled("arena_used", "arena_size")]];
  if (rows.length && at(rows[rows.length - 1], "disk_size")) series.push(["disk", filled("disk_used", "disk_size")]);
  draw("fill", series, percent, 1);
}

function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function niceTop(highest) {
  if (!(highest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= highest);
}

function draw(id, series, format, fixedTop) {
  const svg = $(id), width = svg.clientWidth || 360, height = 170, left = 66, right = 8, top = 8, bottom = 20;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const times = series[0][1].map((point) => point[0]);
  const first = times[0] || 0, last = times[times.length - 1] || 1;
  const highest = Math.max(0, ...series.flatMap(([, points]) => points.map((point) => point[1] || 0)));
  const ceiling = fixedTop === null ? niceTop(highest) : fixedTop;
  const x = (time) => left + (width - left - right) * (last > first ? (time - first) / (last - first) : 1);
  const y = (value) => height - bottom - (height - top - bottom) * Math.min(1, value / ceiling);
  const parts = [0, 0.5, 1].flatMap((part) => [
    shape("line", {class: "grid", x1: left, x2: width - right, y1: y(part * ceiling), y2: y(part * ceiling)}),
    shape("text", {x: left - 6, y: y(part * ceiling) + 4, "text-anchor": "end"}, format(part * ceiling)),
  ]);
  if (times.length) {
    parts.push(shape("text", {x: left, y: height - 4}, clock(first)),
      shape("text", {x: width - right, y: height - 4, "text-anchor": "end"}, clock(last)));
  }
  series.forEach(([, points], number) => {
    let path = "", pen = false;
    for (const [time, value] of points) {
      if (value === null) { pen = false; continue; }
      path += `${pen ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}${pen ? "" : "h.01"}`;
      pen = true;
    }
    if (path) parts.push(shape("path", {class: number ? "two" : "one", d: path}));
  });
  let index = times.length - 1;
  if (cursor !== null && cursor.id === id && times.length) {
    const time = first + (last - first) * Math.min(1, Math.max(0, (cursor.part * width - left) / (width - left - right)));
    index = times.reduce((best, other, place) => Math.abs(other - time) < Math.abs(times[best] - time) ? place : best, 0);
    parts.push(shape("line", {class: "cursor", x1: x(times[index]), x2: x(times[index]), y1: top, y2: height - bottom}));
  }
  svg.replaceChildren(...parts);
  const labels = series.map(([name, points], number) => {
    const value = index >= 0 ? points[index][1] : null;
    return make("span", `${name} ${value === null ? "–" : format(value)}`, number ? "two" : "one");
  });
  if (cursor !== null && cursor.id === id && index >= 0) labels.push(make("em", clock(times[index])));
  $(`${id}-legend`).replaceChildren(...labels);
}

for (const id of ["traffic", "ratio", "fill"]) {
  $(id).addEventListener("pointermove", (event) => {
    const box = $(id).getBoundingClientRect();
    cursor = {id, part: (event.clientX - box.left) / box.width};
    if (columns.length) drawAll();
  });
  $(id).addEventListener("pointerleave", () => { cursor = null; if (columns.length) drawAll(); });
}
addEventListener("resize", () => { if (columns.length) drawAll(); });
round();
roundServers();
