"""Which ways to serve a model keep an SLO on which GPUs, and what their tokens cost, by the datasheet's numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from llmq.profiles.architecture import ModelArchitecture
from llmq.profiles.cost import dollars_per_million
from llmq.profiles.devices import Device
from llmq.profiles.errors import InputError
from llmq.profiles.kv_spec import KVCacheLayout
from llmq.profiles.latency_model import LatencyModel, shipped_coefficients
from llmq.profiles.load.arrivals import Arrival
from llmq.profiles.roofline import DecoderWork, Machine
from llmq.profiles.slo import Slo

MOST_BATCH = 1024  # sequences that engines run at once unless told otherwise
_SAMPLED = 1000  # requests of a trace whose blocks are counted


class Outlook(Enum):
    PASS = "PASS"  # the whole interval keeps the SLO
    MAYBE = "MAYBE"  # a part of it
    FAIL = "FAIL"  # nothing of it
    NO_ROOM = "NO ROOM"  # weights and one request do not fit

    @property
    def exit_code(self) -> int:
        return {Outlook.PASS: 0, Outlook.MAYBE: 3}.get(self, 1)


@dataclass(frozen=True)
class Lengths:
    """Of requests in tokens. `tail_prompt`: that the SLO's share of prompts is not longer than."""

    source: str
    requests: tuple[tuple[int, int], ...]  # (prompt, output) of some of them, evenly chosen
    prompt: int
    output: int
    tail_prompt: int

    @classmethod
    def fixed(cls, prompt: int, output: int) -> "Lengths":
        return cls(f"{prompt:,} and {output:,} tokens", ((prompt, output),), prompt, output, prompt)

    @classmethod
    def of_trace(cls, name: str, trace: Sequence[Arrival], slo: Slo, longest: int) -> "Lengths":
        """Raises InputError where no request of it fits the model's context."""
        pairs = [(max(1, one.num_prompt_tokens), max(1, one.num_output_tokens)) for one in trace]
        fitting = [pair for pair in pairs if sum(pair) <= longest]
        if not fitting:
            raise InputError(f"--lengths {name}: no request is at most {longest:,} tokens long, the model's context")
        prompts = sorted(prompt for prompt, _ in fitting)
        tail = prompts[min(len(prompts) - 1, int(len(prompts) * slo.percentile / 100))]
        mean_prompt, mean_output = (round(sum(column) / len(fitting)) for column in zip(*fitting, strict=True))
        step = max(1, len(fitting) // _SAMPLED)
        return cls(name, tuple(fitting[::step]), mean_prompt, max(1, mean_output), tail)


@dataclass(frozen=True)
class Candidate:
    """One way to serve: weights and KV-cache in these formats on `ranks` of this device."""

    device: Device
    ranks: int
    weights: str
    kv_dtype: str
    weight_bytes: int  # of all ranks
    work: DecoderWork
    machine: Machine
    memory_share: float
    price_per_hour: float | None  # of one device

    @cached_property
    def model(self) -> LatencyModel:
        return LatencyModel(self.work, self.machine, shipped_coefficients())

    def most_batch(self, lengths: Lengths) -> int:
        """Requests of these lengths at once, each with all its blocks and its state."""
        layout = self.work.layout
        spare = self.device.memory_bytes * self.memory_share - self.weight_bytes / self.ranks
        held = [layout.reserved_bytes(prompt + output) for prompt, output in lengths.requests]
        return max(0, min(MOST_BATCH, int(spare // (sum(held) / len(held) + layout.state_bytes))))


@dataclass(frozen=True)
class Prediction:
    """What is expected of a candidate at `batch`; intervals are (least, expected, most) seconds."""

    candidate: Candidate
    batch: int
    outlook: Outlook
    latencies_s: dict[str, tuple[float, float, float]]  # of ttft, tpot, e2e
    output_tokens_per_s: float
    input_tokens_per_s: float

    def dollars_per_million(self) -> dict[str, float | None] | None:
        """Of input, output and all tokens, each as if paid for alone; None: the price is not known."""
        price = self.candidate.price_per_hour
        if price is None:
            return None
        rates = {"input": self.input_tokens_per_s, "output": self.output_tokens_per_s}
        rates["total"] = sum(rates.values())
        return {name: dollars_per_million(price * self.candidate.ranks, rate) for name, rate in rates.items()}

    @property
    def order(self) -> tuple[Any, ...]:
        """Surest first, then what costs least; where a price is not known, the most tokens of a device."""
        dollars = self.dollars_per_million()
        cost = dollars["total"] if dollars else None
        per_device = self.output_tokens_per_s / self.candidate.ranks
        return list(Outlook).index(self.outlook), cost is None, cost or 0.0, -per_device


def predict(candidate: Candidate, lengths: Lengths, slo: Slo) -> Prediction:
    """At the largest batch that keeps the SLO for sure; where none does, that is expected to; else one request."""
    most = candidate.most_batch(lengths)
    if most < 1:
        return Prediction(candidate, 0, Outlook.NO_ROOM, {}, 0.0, 0.0)
    for bound, outlook in ((2, Outlook.PASS), (1, Outlook.MAYBE)):
        if batch := _largest(candidate, lengths, slo, most, bound):
            return _prediction(candidate, lengths, slo, batch, outlook)
    could = _keeps(slo, _latencies(candidate, lengths, slo, 1), 0)
    return _prediction(candidate, lengths, slo, 1, Outlook.MAYBE if could else Outlook.FAIL)


def _largest(candidate: Candidate, lengths: Lengths, slo: Slo, most: int, bound: int) -> int:
    """The largest batch up to `most` whose `bound` of all intervals keeps the SLO; all latencies grow with it."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        keeps = _keeps(slo, _latencies(candidate, lengths, slo, middle), bound)
        low, high = (middle, high) if keeps else (low, middle - 1)
    return low


def _keeps(slo: Slo, latencies: dict[str, tuple[float, float, float]], bound: int) -> bool:
    return all(latencies[name][bound] <= limit for name, limit in slo.limits_s.items())


def _latencies(candidate: Candidate, lengths: Lengths, slo: Slo, batch: int) -> dict[str, tuple[float, float, float]]:
    model, lost = candidate.model, candidate.model.coefficients
    tpot = model.tpot_s(batch, lengths.prompt, lengths.output)
    # The tail's own prompt is longer than the mean one that it waits for.
    longer = model.prefill_s(lengths.tail_prompt) - model.prefill_s(lengths.prompt)
    ttft = model.ttft_s(batch, lengths.prompt, lengths.output, min(slo.percentile, 99.9) / 100) + max(0.0, longer)
    expected = {"ttft": ttft, "tpot": tpot, "e2e": ttft + (lengths.output - 1) * tpot}
    return {name: (one * lost.low, one, one * lost.high) for name, one in expected.items()}


def _prediction(candidate: Candidate, lengths: Lengths, slo: Slo, batch: int, outlook: Outlook) -> Prediction:
    rate = candidate.model.tokens_per_s(batch, lengths.prompt, lengths.output)
    return Prediction(
        candidate,
        batch,
        outlook,
        _latencies(candidate, lengths, slo, batch),
        rate,
        rate * lengths.prompt / lengths.output,
    )


def candidates(
    config: dict[str, Any],
    devices: Sequence[Device],
    *,
    weight_bytes: dict[str, int],
    kv_dtypes: Sequence[str],
    ranks: Mapping[str, Sequence[int]],
    memory_share: float,
    price_per_hour: float | None = None,
) -> list[Candidate]:
    """All combinations. `weight_bytes` and `ranks`: of each format, which a model can be split into.
    `price_per_hour`: of one device, in place of the listed one."""
    architecture = ModelArchitecture.from_config(config)
    found = []
    for number in sorted({number for numbers in ranks.values() for number in numbers}):
        layouts = {name: KVCacheLayout.of(architecture, name, tensor_parallel=number) for name in kv_dtypes}
        for weights, num_bytes in weight_bytes.items():
            if number not in ranks[weights]:
                continue
            for kv_dtype, layout in layouts.items():
                work = DecoderWork.of(config, layout, num_bytes, number)
                found += [
                    Candidate(
                        device,
                        number,
                        weights,
                        kv_dtype,
                        num_bytes,
                        work,
                        machine,
                        memory_share,
                        device.price_per_hour if price_per_hour is None else price_per_hour,
                    )
                    for device in devices
                    if (machine := machine_of(device, weights)) is not None
                ]
    return found


# The format that products are computed in, by the weights'; integers of 2 to 8 bits are unpacked to 16 bit.
_RATES = {"fp8": "fp8_tflops", "int8": "int8_tflops"}


def machine_of(device: Device, weights: str | None) -> Machine | None:
    """The device as a machine that runs such weights; None where devices.toml has no rates of it."""
    wanted = _RATES.get((weights or "").lower().partition(" ")[0], "bf16_tflops")  # "fp8 in blocks" too
    field = next((name for name in (wanted, "bf16_tflops", "fp16_tflops") if getattr(device, name)), None)
    if field is None or not device.bandwidth_bytes_per_s:
        return None
    how = f"datasheet, dense {field.partition('_')[0].upper()}: {device.source}"
    link = device.link_gb_s and device.link_gb_s * 1e9
    return Machine(device.name, device.bandwidth_bytes_per_s, getattr(device, field) * 1e12, how, link)
