"""What `--compile` needs of the machine."""

from headrace.errors import ConfigError


def check_compiler() -> None:
    """Raise ConfigError before torch.compile would fail in the first update."""
    # Imported here, since most runs do not need it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "compile=True, but torch.compile finds no C++ compiler that works.\n"
            "Install g++ (or name one by CXX), or train without --compile."
        ) from error
