"""What to do to a model, decided before any weight is read."""

from dataclasses import dataclass, replace
from typing import Literal

from llmq.profiles.errors import InputError
from llmq.quantize.formats.scheme import ActivationScheme, WeightScheme

Method = Literal["awq", "gptq", "smoothquant", "fp8", "rtn"]

# Group sizes that kernels are written for, the cheapest first.
STANDARD_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class MethodTraits:
    """What a method is, and which options it honours."""

    title: str
    bits: int
    symmetric: bool  # its default
    is_grouped: bool  # takes --group-size, --sym, --asym
    is_calibrated: bool  # takes --calib, --samples, --seq-len
    activation: ActivationScheme | None = None


METHODS: dict[Method, MethodTraits] = {
    "awq": MethodTraits("AWQ, 4-bit weights", 4, False, True, True),
    "gptq": MethodTraits("GPTQ, 4-bit weights", 4, False, True, True),
    "rtn": MethodTraits("round to nearest, 4-bit weights", 4, False, True, False),
    "smoothquant": MethodTraits(
        "SmoothQuant, INT8 weights and activations", 8, True, False, True, ActivationScheme("int")
    ),
    "fp8": MethodTraits("FP8 E4M3 weights and activations", 8, True, False, False, ActivationScheme("float")),
}


@dataclass(frozen=True)
class Recipe:
    """A method with every choice made, except that `group_size` may still be "auto" (see `preflight`)."""

    method: Method
    bits: int
    group_size: int | Literal["auto", "channel"]
    symmetric: bool
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        method: Method,
        *,
        bits: int | None = None,
        group_size: str | int | None = None,
        symmetric: bool | None = None,
        ignore: tuple[str, ...] = (),
    ) -> "Recipe":
        """Fill in the method's defaults. Raises InputError for a choice the method does not honour."""
        traits = METHODS[method]
        if bits not in (None, traits.bits):
            raise InputError(_wrong_bits(method, bits))
        if not traits.is_grouped:
            for flag, value in (("--group-size", group_size), ("--sym/--asym", symmetric)):
                if value is not None:
                    raise InputError(
                        f"{flag} does not apply to --{method}: its weights have one scale a row, symmetric"
                    )
        return cls(
            method=method,
            bits=traits.bits,
            group_size=_parse_group_size(group_size) if traits.is_grouped else "channel",
            symmetric=traits.symmetric if symmetric is None else symmetric,
            ignore=tuple(ignore),
        )

    @property
    def traits(self) -> MethodTraits:
        return METHODS[self.method]

    @property
    def scheme(self) -> WeightScheme:
        """What each target becomes. The group size must have been resolved."""
        if self.group_size == "auto":
            raise ValueError("the group size is not resolved yet")
        layouts = {"smoothquant": "int-quantized", "fp8": "float-quantized"}
        is_grouped = self.group_size != "channel"
        return WeightScheme(
            kind="float" if self.method == "fp8" else "int",
            bits=self.bits,
            strategy="group" if is_grouped else "channel",
            group_size=self.group_size if is_grouped else None,
            symmetric=self.symmetric,
            activation=self.traits.activation,
            layout=layouts.get(self.method, "pack-quantized"),
        )

    def with_group_size(self, group_size: int | str) -> "Recipe":
        return replace(self, group_size=group_size)


def _parse_group_size(text: str | int | None) -> int | str:
    if text in (None, "auto"):
        return "auto"
    if text in ("channel", "-1", -1):
        return "channel"
    try:
        size = int(text)
    except ValueError:
        raise InputError(f"--group-size {text}: a number, 'auto' or 'channel' is expected") from None
    if size < 16 or size % 8:
        raise InputError(f"--group-size {size}: a multiple of 8 from 16 up is expected (usual: 128, 64, 32, 16)")
    return size


def _wrong_bits(method: Method, bits: int) -> str:
    usable = [f"--{name}" for name, traits in METHODS.items() if traits.bits == bits]
    instead = f"; {bits} bits: {', '.join(usable)}" if usable else ""
    return f"--bits {bits} is not supported with --{method}, which stores {METHODS[method].bits}-bit weights{instead}"
