CUDA: str | None
SASS: tuple[str, ...]
PTX: tuple[str, ...]
