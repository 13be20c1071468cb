"""What to do to a model, decided before any weight is read."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmq.profiles.errors import InputError
from llmq.quantize.backends.registry import OWN, backend_named
from llmq.quantize.formats.scheme import ActivationScheme, KVCacheScheme, WeightScheme

Method = Literal["awq", "gptq", "best", "smoothquant", "fp8", "rtn"]
Fp8Scheme = Literal["dynamic", "static", "block"]
KVChoice = Literal["fp8", "int8"]

# Group sizes that kernels are written for, the cheapest first.
STANDARD_GROUP_SIZES = (128, 64, 32, 16)
FP8_SCHEMES: tuple[Fp8Scheme, ...] = ("dynamic", "static", "block")
DEFAULT_FORMAT = "compressed-tensors"
# What --kv asks for: one calibrated scale for K and one for V of a layer.
KV_SCHEMES: dict[KVChoice, KVCacheScheme] = {
    name: KVCacheScheme(kind=kind, bits=8, strategy="tensor", dynamic=False, symmetric=True)
    for name, kind in (("fp8", "float"), ("int8", "int"))
}


@dataclass(frozen=True)
class MethodTraits:
    """What a method is, and which options it honours."""

    title: str
    bits: tuple[int, ...]  # that it stores, its default first
    symmetric: bool  # its default, where the format and the loaders of experts take it
    is_grouped: bool  # takes --group-size, --sym, --asym
    is_calibrated: bool  # takes --calib, --samples, --seq-len
    moves_scales: bool = False  # into the norms before the linears: needs to know which feed which
    backends: tuple[str, ...] = (OWN,)  # who can run it, the default first


METHODS: dict[Method, MethodTraits] = {
    "awq": MethodTraits("AWQ", (4, 3, 8), False, True, True, moves_scales=True, backends=(OWN, "autoawq")),
    "gptq": MethodTraits("GPTQ", (4, 3, 8), False, True, True, backends=(OWN, "llmcompressor", "autogptq")),
    "best": MethodTraits("the better of AWQ and GPTQ for each layer", (4, 3, 8), False, True, True, moves_scales=True),
    "rtn": MethodTraits("round to nearest", (4, 3, 8), False, True, False),
    "smoothquant": MethodTraits(
        "SmoothQuant, INT8 weights and activations",
        (8,),
        True,
        False,
        True,
        moves_scales=True,
        backends=(OWN, "llmcompressor"),
    ),
    "fp8": MethodTraits("FP8 E4M3 weights and activations", (8,), True, False, False, backends=(OWN, "llmcompressor")),
}


@dataclass(frozen=True)
class LinearSettings:
    """What a linear becomes. `group_size` may still be "auto", `symmetric` None: by the format (see `preflight`)."""

    method: Method
    bits: int
    group_size: int | Literal["auto", "channel"]
    symmetric: bool | None
    fp8_scheme: Fp8Scheme = "dynamic"

    @classmethod
    def of(
        cls,
        method: Method,
        *,
        bits: int | None = None,
        group_size: str | int | None = None,
        symmetric: bool | None = None,
        fp8_scheme: str | None = None,
    ) -> "LinearSettings":
        """Fill in the method's defaults. Raises InputError for a choice the method does not honour."""
        traits = METHODS[method]
        if bits is not None and bits not in traits.bits:
            raise InputError(_wrong_bits(method, bits))
        if not traits.is_grouped:
            for flag, value in (("--group-size", group_size), ("--sym/--asym", symmetric)):
                if value is not None:
                    raise InputError(
                        f"{flag} does not apply to --{method}: its weights have one scale a row, symmetric"
                    )
        if fp8_scheme is not None and method != "fp8":
            raise InputError(f"--fp8-scheme does not apply to --{method}")
        if fp8_scheme not in (None, *FP8_SCHEMES):
            raise InputError(f"--fp8-scheme {fp8_scheme}: one of {', '.join(FP8_SCHEMES)} is expected")
        return cls(
            method=method,
            bits=bits or traits.bits[0],
            group_size=_parse_group_size(group_size) if traits.is_grouped else "channel",
            symmetric=symmetric if traits.is_grouped else traits.symmetric,
            fp8_scheme=fp8_scheme or "dynamic",
        )

    @property
    def traits(self) -> MethodTraits:
        return METHODS[self.method]

    @property
    def is_calibrated(self) -> bool:
        return self.traits.is_calibrated or (self.method == "fp8" and self.fp8_scheme == "static")

    @property
    def scheme(self) -> WeightScheme:
        """What a linear is stored as. The group size and the sign must have been resolved."""
        if self.group_size == "auto" or self.symmetric is None:
            raise ValueError("the group size or the sign is not resolved yet")
        if self.method == "fp8":
            return _FP8_WEIGHTS[self.fp8_scheme]
        if self.method == "smoothquant":
            return WeightScheme("int", 8, "channel", activation=ActivationScheme("int"), layout="int-quantized")
        is_grouped = self.group_size != "channel"
        return WeightScheme(
            kind="int",
            bits=self.bits,
            strategy="group" if is_grouped else "channel",
            group_size=self.group_size if is_grouped else None,
            symmetric=self.symmetric,
            layout="pack-quantized",
        )


_FP8_WEIGHTS = {
    "dynamic": WeightScheme("float", 8, "channel", activation=ActivationScheme("float"), layout="float-quantized"),
    "static": WeightScheme(
        "float", 8, "tensor", activation=ActivationScheme("float", dynamic=False), layout="float-quantized"
    ),
    "block": WeightScheme(
        "float",
        8,
        "block",
        group_size=128,
        activation=ActivationScheme("float", group_size=128),
        layout="float-quantized",
        block_rows=128,
    ),
}


@dataclass(frozen=True)
class Rule:
    """Settings of their own for the linears that `patterns` name (as --ignore does); None: left in 16 bit."""

    patterns: tuple[str, ...]
    settings: LinearSettings | None


@dataclass(frozen=True)
class MethodOptions:
    """What a method is told beside the schemes. None: its own default."""

    alpha: float | None = None  # SmoothQuant's; None: searched for each mapping
    damp: float | None = None  # GPTQ's damping, as a share of the Hessian's mean diagonal
    smooth_only: bool = False  # AWQ and SmoothQuant: move the scales, round nothing


@dataclass(frozen=True)
class Recipe:
    """Every choice made, except for what LinearSettings may leave open."""

    default: LinearSettings
    rules: tuple[Rule, ...] = ()  # of several that name a linear the last one counts
    ignore: tuple[str, ...] = ()
    options: MethodOptions = field(default_factory=MethodOptions)
    kv: KVChoice | None = None
    format: str = DEFAULT_FORMAT
    backend: str = OWN

    @classmethod
    def of(
        cls,
        method: Method,
        *,
        ignore: tuple[str, ...] = (),
        rules: tuple[Rule, ...] = (),
        options: MethodOptions | None = None,
        kv: str | None = None,
        format: str | None = None,
        backend: str | None = None,
        **settings: Any,
    ) -> "Recipe":
        """settings: of LinearSettings; format None: the backend's own. Raises InputError for a choice that is not
        honoured."""
        backend = backend or METHODS[method].backends[0]
        recipe = cls(
            default=LinearSettings.of(method, **settings),
            rules=tuple(rules),
            ignore=tuple(ignore),
            options=options or MethodOptions(),
            kv=kv,
            format=format or (DEFAULT_FORMAT if backend == OWN else backend_named(backend).default_format),
            backend=backend,
        )
        _check_options(recipe)
        return recipe

    @property
    def method(self) -> Method:
        return self.default.method

    @property
    def traits(self) -> MethodTraits:
        return self.default.traits

    @property
    def bits(self) -> int:
        return self.default.bits

    @property
    def group_size(self) -> int | str:
        return self.default.group_size

    @property
    def scheme(self) -> WeightScheme:
        return self.default.scheme

    @property
    def kv_scheme(self) -> KVCacheScheme | None:
        """What the checkpoint will ask of the KV-cache."""
        return None if self.kv is None else KV_SCHEMES[self.kv]

    @property
    def all_settings(self) -> tuple[LinearSettings, ...]:
        return (self.default, *(rule.settings for rule in self.rules if rule.settings is not None))

    @property
    def methods(self) -> set[Method]:
        return {settings.method for settings in self.all_settings}

    @property
    def is_calibrated(self) -> bool:
        """Whether data passes through the model: for a method, or for the scales of the KV-cache."""
        return self.kv is not None or any(settings.is_calibrated for settings in self.all_settings)

    def with_group_size(self, group_size: int | str) -> "Recipe":
        return replace(self, default=replace(self.default, group_size=group_size))


def _check_options(recipe: Recipe) -> None:
    options, methods = recipe.options, recipe.methods
    if options.alpha is not None and "smoothquant" not in methods:
        raise InputError("--alpha is SmoothQuant's: it has no effect here")
    if options.alpha is not None and not 0 <= options.alpha <= 1:
        raise InputError(f"--alpha {options.alpha}: a number from 0 (weights) to 1 (activations) is expected")
    if options.damp is not None and not methods & {"gptq", "best"}:
        raise InputError("--damp is GPTQ's: it has no effect here")
    if options.damp is not None and not 0 < options.damp <= 1:
        raise InputError(f"--damp {options.damp}: a share of the Hessian's mean diagonal is expected, above 0 up to 1")
    if options.smooth_only and (still := sorted(m for m in methods if not METHODS[m].moves_scales or m == "best")):
        raise InputError(f"--dry-quant moves scales and rounds nothing: it goes with --smoothquant, not --{still[0]}")
    if options.smooth_only and recipe.kv:
        raise InputError(f"--dry-quant rounds nothing: leave --kv {recipe.kv} out")
    if options.smooth_only and recipe.format != DEFAULT_FORMAT:
        raise InputError(
            f"--dry-quant rounds nothing, so there is nothing to lay out: leave --format {recipe.format} out"
        )
    if recipe.kv not in (None, *KV_SCHEMES):
        raise InputError(f"--kv {recipe.kv}: {' or '.join(KV_SCHEMES)} is expected")
    for method in sorted(methods):
        if recipe.backend not in METHODS[method].backends:
            able = ", ".join(METHODS[method].backends)
            raise InputError(f"--backend {recipe.backend} does not run --{method} ({able} {_do(able)})")
    _check_backend(recipe)


def _check_backend(recipe: Recipe) -> None:
    if recipe.backend == OWN:
        return
    lacking = {
        "--recipe with settings for single linears": bool(recipe.rules),
        "--kv": recipe.kv is not None,
        "--alpha": recipe.options.alpha is not None,
        "--damp": recipe.options.damp is not None,
        "--dry-quant": recipe.options.smooth_only,
        f"--fp8-scheme {recipe.default.fp8_scheme}": recipe.default.fp8_scheme != "dynamic",
    }
    if asked := [words for words, is_asked in lacking.items() if is_asked]:
        raise InputError(f"--backend {recipe.backend} does not honour {' and '.join(asked)}")


def _do(names: str) -> str:
    return "do" if "," in names else "does"


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
    usable = [f"--{name}" for name, traits in METHODS.items() if bits in traits.bits]
    instead = f"; {bits} bits: {', '.join(usable)}" if usable else ""
    stored = " or ".join(map(str, sorted(METHODS[method].bits)))
    return f"--bits {bits} is not supported with --{method}, which stores {stored}-bit weights{instead}"
