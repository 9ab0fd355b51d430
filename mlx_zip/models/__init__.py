"""Models with a growing vocabulary: mlx-lm's decoder blocks, with an embedding and a head that also use hyper rows."""

from mlx_zip.decoders import supported_types
from mlx_zip.models.architectures import check_config
from mlx_zip.models.arguments import ModelArgs
from mlx_zip.models.session import Session
from mlx_zip.models.zip_model import Model

__all__ = ["Model", "ModelArgs", "Session", "check_config", "supported_types"]
