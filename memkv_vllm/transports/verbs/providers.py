"""Names to verbs providers, each imported on use: no other module needs to know that there are two."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.verbs.provider import Provider

__all__ = ["DEFAULT_PROVIDER", "PROVIDERS", "load_provider"]

DEFAULT_PROVIDER = "libibverbs"
"""By measurement (benchmarks/README.md, "Verbs providers"): cheaper per work request, and no lock held in a post."""


def _libibverbs() -> Provider:
    from memkv_vllm.transports.verbs.libibverbs import LibibverbsProvider

    try:
        return LibibverbsProvider()
    except OSError as error:
        raise EnvironmentFault(
            f"transport verbs needs libibverbs, which cannot be loaded ({error}); expected libibverbs.so.1 and the "
            "NIC's driver for it: install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core (RHEL, "
            "Fedora), in the container too"
        ) from error


def _pyverbs() -> Provider:
    try:
        from memkv_vllm.transports.verbs.pyverbs_provider import PyverbsProvider
    except ImportError as error:
        raise EnvironmentFault(
            f"the pyverbs provider needs the Python package pyverbs, which Python {platform.python_version()} "
            f"({sys.executable}) cannot import ({error}); expected the build of this host's rdma-core: install "
            "python3-pyverbs (Debian 12: for Python 3.11 only) and link it into a virtual environment, or use the "
            "libibverbs provider, which needs no Python package"
        ) from error
    return PyverbsProvider()


PROVIDERS: dict[str, Callable[[], Provider]] = {"libibverbs": _libibverbs, "pyverbs": _pyverbs}


def load_provider(name: str = DEFAULT_PROVIDER) -> Provider:
    """The provider called ``name``; never another one instead.

    Raises:
        EnvironmentFault: there is none of that name, or this host lacks its library; names what to install.
    """
    if name not in PROVIDERS:
        raise EnvironmentFault(f"no verbs provider is called {name!r}; known: {', '.join(sorted(PROVIDERS))}")
    return PROVIDERS[name]()
