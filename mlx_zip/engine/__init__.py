"""Engines: the interface through which a front (server, chat, app) uses a model."""

from mlx_zip.engine.interface import Ceiling as Ceiling
from mlx_zip.engine.interface import Constraint as Constraint
from mlx_zip.engine.interface import Counted as Counted
from mlx_zip.engine.interface import Counts as Counts
from mlx_zip.engine.interface import Differing as Differing
from mlx_zip.engine.interface import Emitted as Emitted
from mlx_zip.engine.interface import Engine as Engine
from mlx_zip.engine.interface import EngineInfo as EngineInfo
from mlx_zip.engine.interface import Event as Event
from mlx_zip.engine.interface import Failed as Failed
from mlx_zip.engine.interface import Figures as Figures
from mlx_zip.engine.interface import Finished as Finished
from mlx_zip.engine.interface import Held as Held
from mlx_zip.engine.interface import Likely as Likely
from mlx_zip.engine.interface import Origin as Origin
from mlx_zip.engine.interface import Progress as Progress
from mlx_zip.engine.interface import PromptId as PromptId
from mlx_zip.engine.interface import SessionInfo as SessionInfo
from mlx_zip.engine.interface import Started as Started
from mlx_zip.engine.interface import Submission as Submission
from mlx_zip.engine.interface import Ticket as Ticket
from mlx_zip.engine.interface import events as events
