"""The optional native code: shared libraries of XLA FFI handlers, loaded when first asked for.

They are built from `csrc/`, one library a part ("cpu", "cuda"), and either may be missing: whatever
they hold has a `jax.numpy` lowering too. An operator asks `register` for its handler and, if that
is not to be had, takes the other lowering; the answer carries the reason.
"""

import ctypes
import dataclasses
import re
import threading
from pathlib import Path
from typing import Literal, get_args

import jax

Part = Literal["cpu", "cuda"]

PARTS: tuple[Part, ...] = get_args(Part)

# Those that operators call, by the names of their symbols and FFI targets, with their parts.
APPEND_MLA = "jax_beam_attn_append_mla"
MLA_SCHEDULE = "jax_beam_attn_mla_schedule"
TURBOQUANT_STORE = "jax_beam_attn_turboquant_store"
HANDLERS: dict[str, tuple[Part, ...]] = {
    APPEND_MLA: PARTS,
    MLA_SCHEDULE: PARTS,
    TURBOQUANT_STORE: ("cpu",),
}

# The contract with the libraries; csrc/abi.h holds the same number.
ABI_VERSION = 1

# As JAX's registry spells them: for another spelling it registers a target that XLA never finds.
_PLATFORM: dict[Part, str] = {"cpu": "cpu", "cuda": "CUDA"}

_FOLDER = Path(__file__).resolve().parents[1] / "_native"

_lock = threading.RLock()
_libraries: dict[Part, ctypes.CDLL | str] = {}  # a string is the reason why there is no library
_handlers: dict[tuple[str, Part], "Availability"] = {}


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether something native can be used, and if not, why."""

    available: bool
    reason: str = ""


def status() -> dict[Part, Availability]:
    """Tells for each part whether its library is there and fits this package and this jaxlib."""
    return {part: _availability(_library(part)) for part in PARTS}


def register(name: str, part: Part) -> Availability:
    """Makes handler `name` of a part callable as `jax.ffi.ffi_call(name, ...)` on its platform.

    May be called often and from any thread; the target is registered once.

    Args:
        name: symbol of the handler in the library, and name of the FFI target.
        part: the library, which is also the platform that the target is registered for.

    Returns:
        Whether the target is there, else the reason.
    """
    with _lock:
        if (name, part) not in _handlers:
            _handlers[name, part] = _register(name, part)
        return _handlers[name, part]


def _register(name: str, part: Part) -> Availability:
    library = _library(part)
    if isinstance(library, str):
        return Availability(False, library)
    try:
        handler = getattr(library, name)
    except AttributeError:
        return Availability(False, f"{_path(part).name} has no handler {name}")
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=_PLATFORM[part])
    return Availability(True)


def _library(part: Part) -> ctypes.CDLL | str:
    with _lock:
        if part not in _libraries:
            _libraries[part] = _load(_path(part))
        return _libraries[part]


def _availability(library: ctypes.CDLL | str) -> Availability:
    return Availability(False, library) if isinstance(library, str) else Availability(True)


def _path(part: Part) -> Path:
    return _FOLDER / f"libjax_beam_attn_{part}.so"


def _load(path: Path) -> ctypes.CDLL | str:
    """Loads a library that fits, or says why not."""
    if not path.exists():
        return f"not built: {path.name} is not in this installation"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} failed to load: {error}"
    try:
        abi = library.jax_beam_attn_abi_version()
        built_with = library.jax_beam_attn_ffi_api_major(), library.jax_beam_attn_ffi_api_minor()
    except AttributeError as error:
        return f"{path.name} is no library of jax_beam_attn: {error}"
    if abi != ABI_VERSION:
        return f"{path.name} has ABI version {abi}, this package needs {ABI_VERSION}: rebuild it"
    running = _ffi_api_version()
    if running is not None and built_with > running:
        # Registering such a handler would stop the backend of this JAX from starting.
        return (
            f"{path.name} was built for XLA FFI {_dotted(built_with)}, and this jaxlib has "
            f"{_dotted(running)}: rebuild it with the headers of this jaxlib or an older one"
        )
    return library


def _ffi_api_version() -> tuple[int, int] | None:
    """The version of XLA's FFI in this jaxlib, which tells it in its header only."""
    try:
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return None
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{name} (\d+)", header) for name in ("MAJOR", "MINOR")
    )
    return (int(major[1]), int(minor[1])) if major and minor else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
