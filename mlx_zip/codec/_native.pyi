from collections.abc import Callable
from typing import Any

ffi: Any
lib: Any

def calls_for_one_id(
    owner: object, address: int
) -> tuple[Callable[[object], bytes | None], Callable[[object], bytes | None], Callable[[object], bytes | None]]: ...
def words_of(ids: object) -> bytes | None: ...
def ids_of(words: bytes) -> tuple[int, ...]: ...
