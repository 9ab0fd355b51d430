"""mlx_zip: language models whose vocabulary grows while they run (zip2zip, arXiv 2506.01084), on MLX.

The names in `__all__` are loaded on first use, so `import mlx_zip` imports none of mlx, mlx_lm, transformers and torch.
The import also registers converted models with `mlx_lm`, which can then load them (see `mlx_zip.models.register`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import explain_missing_mlx
from mlx_zip.models.register import register

if TYPE_CHECKING:  # what `__getattr__` loads, for type checkers and editors
    from mlx_zip.codec import Codebook as Codebook
    from mlx_zip.codec import CodecParams as CodecParams
    from mlx_zip.codec import compress as compress
    from mlx_zip.config import ZipConfig as ZipConfig
    from mlx_zip.engine.mlx.generate import batch_generate as batch_generate
    from mlx_zip.engine.mlx.generate import generate as generate
    from mlx_zip.engine.mlx.generate import stream_generate as stream_generate
    from mlx_zip.engine.responses import GenerationResponse as GenerationResponse
    from mlx_zip.errors import CodecError as CodecError
    from mlx_zip.errors import ConfigError as ConfigError
    from mlx_zip.errors import ConversionError as ConversionError
    from mlx_zip.errors import DataError as DataError
    from mlx_zip.errors import GenerationError as GenerationError
    from mlx_zip.errors import InstallationError as InstallationError
    from mlx_zip.errors import MachineError as MachineError
    from mlx_zip.errors import MlxZipError as MlxZipError
    from mlx_zip.errors import ModelError as ModelError
    from mlx_zip.errors import TrainingError as TrainingError
    from mlx_zip.layout import Layout as Layout
    from mlx_zip.models.loading import load as load
    from mlx_zip.models.rows.row_store import RowStore as RowStore
    from mlx_zip.models.rows.zip_state import ZipState as ZipState
    from mlx_zip.packs.pack import Pack as Pack
    from mlx_zip.packs.pack import load_pack as load_pack
    from mlx_zip.text.prompts import Chat as Chat

    convert: Any  # from `mlx_zip.converters`, which no other package may import (docs/decisions.md)

__version__ = "0.1.0"

_HOMES = {
    "CodecParams": "mlx_zip.codec",
    "Codebook": "mlx_zip.codec",
    "compress": "mlx_zip.codec",
    "ZipConfig": "mlx_zip.config",
    "Layout": "mlx_zip.layout",
    "ZipState": "mlx_zip.models.rows.zip_state",
    "RowStore": "mlx_zip.models.rows.row_store",
    "Chat": "mlx_zip.text.prompts",
    "Pack": "mlx_zip.packs.pack",
    "load_pack": "mlx_zip.packs.pack",
    "load": "mlx_zip.models.loading",
    "GenerationResponse": "mlx_zip.engine.responses",
    "generate": "mlx_zip.engine.mlx.generate",
    "stream_generate": "mlx_zip.engine.mlx.generate",
    "batch_generate": "mlx_zip.engine.mlx.generate",
    "convert": "mlx_zip.converters",
    "CodecError": "mlx_zip.errors",
    "ConfigError": "mlx_zip.errors",
    "ConversionError": "mlx_zip.errors",
    "DataError": "mlx_zip.errors",
    "GenerationError": "mlx_zip.errors",
    "InstallationError": "mlx_zip.errors",
    "MlxZipError": "mlx_zip.errors",
    "ModelError": "mlx_zip.errors",
    "MachineError": "mlx_zip.errors",
    "TrainingError": "mlx_zip.errors",
}

__all__ = [*sorted(_HOMES), "register"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_zip' has no attribute {name!r}")
    with explain_missing_mlx():
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))


register()
