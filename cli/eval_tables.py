"""What `llmq eval` prints: a text's measures, tasks' scores, a comparison and its verdict."""

from typing import TYPE_CHECKING, Any

from llmq.cli import console

if TYPE_CHECKING:
    from llmq.evals.comparison import Comparison
    from llmq.evals.evaluation import TextEvaluation
    from llmq.evals.task_run import TaskRun
    from llmq.evals.verdict import PairedComparison, Verdict

# Above this share of generations that hit the cap or came back empty, a score says little about the model.
_SUSPECT_SHARE = 0.02


def print_text_evaluation(evaluation: "TextEvaluation", weight_bytes: int, baseline_bytes: int | None) -> None:
    """The measures with what each one is, beside those of the baseline where there was one."""
    p, d = evaluation.perplexity, evaluation.divergence
    title = (
        f"{evaluation.text.source}: {p.num_scored:,} of {p.num_tokens:,} tokens scored in {p.num_windows} windows "
        f"of {p.window}, stride {p.stride}; {console.format_duration(p.elapsed_s)}"
    )
    definitions = evaluation.to_dict()["definitions"]
    names = {"token_ppl": "token perplexity", "word_ppl": "word perplexity", "bits_per_byte": "bits per byte"}
    if p.token_ppl_full_windows not in (None, p.token_ppl):
        names["token_ppl_full_windows"] = "  full windows only"
    rows = [[names[key], *_both(key, p, d and d.baseline), definitions[key]] for key in definitions if key in names]
    size = [console.format_bytes(n) for n in (baseline_bytes, weight_bytes) if n is not None]
    rows.append(["weights in memory", *size, ""])
    console.print_table(title, ["", *([">baseline"] if d else []), ">model", "what it is"], rows)
    if d:
        values = (f"{d.mean_kl:.5f}", f"{d.p99_kl:.5f}", f"{d.max_kl:.4f}", f"{d.top1_agreement:.2%}")
        labels = ("mean KL", "99th percentile KL", "largest KL", "top-1 agreement")
        keys = ("mean_kl", "p99_kl", "max_kl", "top1_agreement")
        rows = [[label, value, definitions[key]] for label, value, key in zip(labels, values, keys, strict=True)]
        console.print_table("against the baseline", ["", ">", "what it is"], rows)


def _both(key: str, candidate: Any, baseline: Any) -> list[str]:
    return [f"{getattr(measured, key):.4f}" for measured in (baseline, candidate) if measured is not None]


def print_tasks(title: str, run: "TaskRun") -> None:
    rows = [
        [
            s.task,
            s.metric,
            f"{s.value:.4f}",
            f"± {s.stderr:.4f}" if s.stderr is not None else "",
            s.num_items,
            s.num_fewshot,
        ]
        for s in run.scores
    ]
    console.print_table(title, ["task", "metric", ">value", "", ">items", ">few-shot"], rows)
    counts = run.counts
    remarks = {
        "contexts cut from the left to fit the model": counts.num_truncated,
        "requests of items longer than the model, which are in no score": counts.num_left_out,
        "continuations encoded apart from their context (they left no token of their own)": counts.num_encoded_apart,
        "continuations sharing a token with their context": counts.num_unequal_joins,
        "conversations without their system turn, which the chat template refuses": counts.num_system_dropped,
    }
    for remark, count in remarks.items():
        if count:
            console.print_text(f"  {count:,} {remark}")


def say_suspect_generations(run: "TaskRun") -> None:
    """On stderr, with --json too: answers that were cut or empty, a warning where they are many."""
    counts = run.counts
    for what, count in (("ended at max_gen_toks", counts.num_hit_cap), ("came back empty", counts.num_empty)):
        if count:
            share = count / counts.num_generations
            say = console.warn if share > _SUSPECT_SHARE else console.status
            say(f"{count:,} of {counts.num_generations:,} generations ({share:.1%}) {what}")


def print_comparison(comparison: "Comparison", max_drop: float | None) -> "Verdict | None":
    """The tasks side by side, and the verdict where a margin was given."""
    from llmq.evals.comparison import ALL
    from llmq.evals.verdict import DEFINITIONS, Verdict

    rows = [_comparison_row(one.task, one.metric, one.scores) for one in comparison.tasks]
    if len(comparison.tasks) > 1:
        rows += [[], _comparison_row(ALL, "", comparison.overall)]
    columns = [
        "task",
        "score",
        ">baseline",
        ">model",
        ">drop",
        ">95 % interval",
        ">lost",
        ">won",
        ">McNemar p",
        ">items",
    ]
    console.print_table("item by item against the baseline", columns, rows)
    console.print_notes([f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()])
    if max_drop is None:
        return None
    overall = comparison.overall
    verdict = overall.verdict(max_drop)
    above, below = overall.one_sided
    reason = {
        Verdict.PASS: f"with 95 % confidence the drop is below {below:.2%}",
        Verdict.FAIL: f"with 95 % confidence the drop is above {above:.2%}",
        Verdict.NOT_ENOUGH: f"the drop may be anything from {above:.2%} to {below:.2%}",
    }[verdict]
    if verdict is Verdict.NOT_ENOUGH:
        needed = overall.items_needed(max_drop)
        reason += (
            f"; about {needed:,} items would decide it" if needed else "; no number of items is likely to decide it"
        )
    console.heading(f"{verdict.value}: {reason} (allowed: {max_drop:.2%}), on {overall.num_items:,} items")
    return verdict


def _comparison_row(task: str, metric: str, scores: "PairedComparison") -> list[str]:
    low, high = scores.interval
    is_paired = scores.mcnemar_p is not None
    return [
        task,
        metric,
        f"{scores.baseline:.4f}",
        f"{scores.candidate:.4f}",
        f"{scores.drop:+.4f}",
        f"{low:+.4f} … {high:+.4f}",
        str(scores.lost) if is_paired else "",
        str(scores.won) if is_paired else "",
        f"{scores.mcnemar_p:.3g}" if is_paired else "",
        f"{scores.num_items:,}",
    ]
