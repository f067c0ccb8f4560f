"""Measure how many directions the embedding and the feed-forward's weights and activations use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import pandas as pd
import torch

from lamina.core.frames import Frame
from lamina.core.values import number, one_of
from lamina.errors import UserError
from lamina.probes.engine.context import Context
from lamina.probes.engine.figures import Figure, chart
from lamina.probes.engine.registry import COLUMNS, Probe, check_most, probe, sample_of
from lamina.probes.structure.hooks import observe
from lamina.probes.structure.sites import LayerSite, Point

Row = tuple[int, str, str, int, str, float, float]
FLOOR = 1e-12  # smaller eigenvalues are rounding errors
_FIGURES = {
    "hard_rank": (
        "Hard rank",
        "Participation ratio of the eigenvalues of the activations' covariance, divided by the number of eigenvalues.",
    ),
    "soft_rank": (
        "Soft rank",
        "Exponential of the entropy of the covariance's eigenvalues, divided by the number of eigenvalues.",
    ),
    "edr": ("Effective dimension ratio (our definition)", "100 times the harmonic mean of hard rank and soft rank."),
    "eee": (
        "Spectral concentration (our definition)",
        "Share of the spectrum in the top eigenvalues: 0 for a flat spectrum, 1 for a single direction.",
    ),
}
RANKS = tuple(_FIGURES)
_ENOUGH = 4  # tokens per channel to read, even if the other probes are precise enough
Key = tuple[int, str]  # layer, pre or post


@probe
class Spectra(Probe):
    """Measure the spectra of the embedding, of the feed-forward's weights and of the feed-forward's activations.

    Rows of the whole model (layer -1) with role "embedding" describe the covariance of the rows of the embedding matrix
    (FuseNorm Fig 8). Lamina subtracts the mean over the vocabulary. The column ``index`` numbers the eigenvalues, from
    the largest to the smallest.

    ``eigenvalue``: an eigenvalue of the covariance.
    ``eigenvalue_over_median``: the eigenvalue divided by the median eigenvalue.

    Rows of a layer (sublayer feed_forward) with a path as the role, such as ``mlp.up_proj``, describe the weights of
    one projection:

    ``condition_number``: the largest singular value divided by the smallest singular value (FuseNorm Fig 10). If one
        matrix contains both the gate and the up-projection, the roles that end in ``[0]`` and ``[1]`` describe the
        matrix's halves.

    Rows of a layer with role "pre" describe the activations before the nonlinearity, and rows with role "post" describe
    the activations before the down-projection. The metrics summarize the eigenvalues of the activations' covariance.
    Rows of layer -1 hold the means over the layers (FuseNorm Fig 11) and the number of tokens.

    ``hard_rank``: the participation ratio of the eigenvalues, divided by the number of eigenvalues.
    ``soft_rank``: the exponential of the entropy of the eigenvalues, divided by the number of eigenvalues.
    ``edr``: the effective dimension ratio, which is 100 times the harmonic mean of the hard rank and the soft rank.
    ``eee``: how strongly the largest eigenvalues dominate, from 0 (all eigenvalues are equal) to almost 1 (one
        direction). The paper does not define edr and eee, so Lamina chooses the definitions. The definition of eee
        follows Marbut et al. 2023.

    Lamina centers the activations, so massive activations do not dominate the eigenvalues. Experts have no ranks,
    because each expert sees few tokens.

    Options:

    ``few_tokens``: whether to measure the ranks of a text that has no more tokens than the feed-forward has channels.
        The ranks of such a short text are too low. By default ("refuse"), Lamina leaves out the ranks and adds a note
        to the report. In Python, ``lamina.probe`` raises a UserError instead, unless you request all probes. With
        "warn", Lamina measures the ranks and adds a note.
    ``memory``: the memory limit for the covariances in GiB. If the covariances exceed this memory, Lamina reads
        the same text several times.
    ``tokens_per_channel``: the number of tokens to read per channel of the feed-forward (0 for all). The default is 0
        for your own text. For Lamina's embedded corpus, and during training, the default is 4.
    """

    name = "spectra"
    title = "Spectra"
    summary = "eigenvalues of the embedding, and the feed-forwards' condition numbers and ranks of activations"
    of_streams = True
    source = "FuseNorm (SpanNorm, arXiv 2601.22580) Fig 8, 10, 11; Jha & Reagen (arXiv 2510.00537)"

    def __init__(self, few_tokens: str = "refuse", memory: float = 1.0, tokens_per_channel: int | None = None):
        self.few_tokens = one_of("spectra: option 'few_tokens'", few_tokens, ("refuse", "warn"))
        self.memory = number("spectra: option 'memory'", memory, 0, open_low=True)
        self._option = check_most(self.name, "tokens_per_channel", tokens_per_channel)
        self._groups: list[dict[Key, Point]] = []

    def cost(self, context: Context) -> float:
        return 2.0 * min(context.tokens(), 8192)

    def begin(self, context: Context) -> None:
        """Choose each pass's covariances. Raises UserError if the text is too short for the ranks."""
        self._groups: list[dict[Key, Point]] = []
        self._covariances: dict[Key, Covariance] = {}
        self._ranks: dict[Key, dict[str, float]] = {}
        self._widths: dict[int, int] = {}
        self._batches: Counter[Key] = Counter()  # the number of batches in each covariance
        self._tokens = 0
        self.tokens_per_channel = context.most(self._option, _ENOUGH)
        points: dict[Key, Point] = {}
        for site in context.structure.layers:
            for sublayer in site.sublayers:
                if sublayer.feed_forward is not None:
                    parts = {"pre": sublayer.feed_forward.pre, "post": sublayer.feed_forward.post}
                    points.update({(site.index, role): point for role, point in parts.items() if point is not None})
                    self._widths[site.index] = sublayer.feed_forward.width
        missing = context.structure.num_layers - len(self._widths)
        if self._widths and missing:
            context.notes.append(
                f"spectra: {missing} of {context.structure.num_layers} layers have no dense feed-forward, "
                "so Lamina leaves out these layers' ranks and condition numbers"
            )
        if not self._widths:
            context.notes.append("spectra: Lamina found no dense feed-forward, so Lamina leaves out the ranks")
        # The number of an image's patches is unknown here, so ``finish`` checks the number of tokens.
        elif self._tokens_suffice(context, context.tokens() if context.reads_tokens else math.inf):
            budget, used = self.memory * 2**30, math.inf
            for key, point in points.items():
                size = 8 * self._widths[key[0]] ** 2
                if used + size > budget:
                    self._groups.append({})
                    used = 0.0
                self._groups[-1][key] = point
                used += size
            if len(self._groups) > 1:
                context.notes.append(
                    f"spectra: the covariances take {len(self._groups)} passes over the text to stay within "
                    f"{self.memory:g} GiB (option memory)"
                )

    def _tokens_suffice(self, context: Context, tokens: float) -> bool:
        width = max(self._widths.values())
        if tokens > width:
            return True
        text = (
            f"{tokens:g} tokens are too few for the feed-forward's {width} channels. The covariance's rank is at most "
            f"{tokens - 1:g}, so the measured ranks are too low"
        )
        if self.few_tokens == "warn":
            context.note(f"spectra: {text}")
            return True
        message = f"spectra: {text}. Raise --sequences to get more than {width} tokens, or set few_tokens=warn."
        if context.strict:
            raise UserError(message)
        context.notes.append(f"{message} Lamina leaves out the ranks.")
        return False

    def points(self) -> Mapping[Key, Point]:
        """Return the points to watch in the first pass. Later passes compute the covariances that exceed ``memory``."""
        return self._groups[0] if self._groups else {}

    def see(self, key: Key, value: torch.Tensor) -> None:
        """Add a layer's activations [batch, tokens, channels] to the layer's covariance."""
        covariance = self._covariances.setdefault(key, Covariance())
        if self._full(key):
            return  # another token costs width^2 operations
        covariance.add(value)
        self._batches[key] += 1
        self._tokens = max(self._tokens, covariance.count)

    def _full(self, key: Key) -> bool:
        return 0 < self.tokens_per_channel * self._widths[key[0]] <= self._covariances[key].count

    def standard_error(self) -> float | None:
        """Return infinity until the text is long enough, then None, because ranks have no standard error."""
        enough = min(_ENOUGH, self.tokens_per_channel or _ENOUGH)
        return math.inf if self._groups and self._tokens < enough * max(self._widths.values()) else None

    def finish(self, context: Context) -> pd.DataFrame:
        """Compute the spectra. If memory cannot hold all covariances at once, Lamina reads the text several times."""
        rows = embedding_rows(context)
        for site in context.structure.layers:
            rows += condition_rows(site)
            context.progress(site.index + 1, context.structure.num_layers, "condition numbers")
        if self._groups and self._tokens_suffice(context, self._tokens):
            rows += self._rank_rows(context)
        self._covariances = {}
        frame = pd.DataFrame(rows, columns=COLUMNS)
        ranks = frame["role"].isin(["pre", "post"])
        sequences = sample_of(context.batches[: max(self._batches.values(), default=0)]).sequences
        return frame.assign(sequences=ranks * sequences, tokens=ranks * self._tokens)

    def measured(self, context: Context) -> None:
        """Return None, because ``finish`` adds the columns. The rows about weights do not depend on text."""

    def _rank_rows(self, context: Context) -> list[Row]:
        self._reduce()
        for passes, group in enumerate(self._groups[1:], start=1):
            context.progress(passes, len(self._groups), "passes for the covariances")
            with torch.no_grad(), observe(group, self.see, root=context.base):
                for inputs in list(context.batches)[: context.forwards or None]:
                    context.forward(context.on_device(inputs), head=False)
                    if all(self._full(key) for key in group):
                        break
            self._reduce()
        rows = [
            (layer, "feed_forward", role, 0, metric, value, math.nan)
            for (layer, role), ranks in sorted(self._ranks.items())
            for metric, value in ranks.items()
        ]
        for role in ("pre", "post"):
            of_role = [ranks for (_, each), ranks in self._ranks.items() if each == role]
            for metric in RANKS if of_role else ():
                mean = sum(ranks[metric] for ranks in of_role) / len(of_role)
                rows.append((-1, "model", role, 0, metric, mean, math.nan))
            if of_role:
                rows.append((-1, "model", role, 0, "tokens", float(self._tokens), math.nan))
        return rows

    def _reduce(self) -> None:
        for key in list(self._covariances):
            values = self._covariances.pop(key).eigenvalues()
            if not bool(values.isfinite().all()):
                raise UserError(f"spectra: activations of layer {key[0]} are not finite ({key[1]})")
            self._ranks[key] = spectral_utilisation(values)

    def figures(self, frame: Frame) -> Iterator[tuple[Figure, str]]:
        yield from chart(
            frame[frame.metric == "eigenvalue_over_median"],
            *("Spectrum of the embedding", "eigenvalue / median"),
            "Eigenvalues of the covariance of the embedding's rows, divided by the median. A flat line means "
            "an isotropic embedding.",
            x="index",
            x_title="rank",
            log_y=True,
        )
        yield from chart(
            frame[frame.metric == "condition_number"],
            *("Condition numbers", "s_max / s_min"),
            "Condition number of each projection of the feed-forward.",
            color="role",
            log_y=True,
        )
        for metric, (title, caption) in _FIGURES.items():
            ranks = frame[(frame.layer >= 0) & (frame.metric == metric)]
            yield from chart(ranks, title, metric, caption, color="role")

    def sentences(self, frame: Frame) -> Iterator[str]:
        spectrum = frame[frame.metric == "eigenvalue_over_median"].value
        if len(spectrum):
            yield (
                f"The embedding's largest eigenvalue is {spectrum.iloc[0]:.3g} times the median, and the smallest "
                f"is {spectrum.iloc[-1]:.3g} times the median."
            )
        conditions = frame[frame.metric == "condition_number"]
        for role, part in conditions.groupby("role", sort=False):
            worst = part.loc[part.value.idxmax()]
            yield (
                f"The condition number of {role} has the median {part.value.median():.3g} over the layers, and is "
                f"largest in layer {worst.layer} ({worst.value:.3g})."
            )
        means = frame[(frame.layer == -1) & frame.role.isin(["pre", "post"])].set_index(["role", "metric"]).value
        for role, side in (("pre", "before"), ("post", "after")):
            if (role, "hard_rank") in means.index:
                yield (
                    f"{side.capitalize()} the nonlinearity, the hard rank of the feed-forward's activations is "
                    f"{means[role, 'hard_rank']:.3f}. The soft rank is {means[role, 'soft_rank']:.3f}. Both are "
                    "divided by the width: the participation ratio of the covariance's eigenvalues, and exp of the "
                    f"eigenvalues' entropy. The effective dimension ratio, by our definition, is "
                    f"{means[role, 'edr']:.1f}. These three values are means over the layers, on "
                    f"{means[role, 'tokens']:.0f} tokens."
                )


def embedding_rows(context: Context) -> list[Row]:
    """Return the eigenvalues of the embedding's covariance, largest first, and each value divided by the median."""
    weight = getattr(context.structure.embedding, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        context.notes.append("spectra: the model has no token embedding, so Lamina leaves out the eigenvalues")
        return []
    if len(weight) <= weight.shape[1]:
        context.notes.append(
            f"spectra: the embedding has {len(weight)} rows of {weight.shape[1]} channels, so its covariance has "
            f"at most {len(weight) - 1} eigenvalues above 0"
        )
    values = row_covariance_eigenvalues(weight)
    if not bool(values.isfinite().all()):
        raise UserError(
            "spectra: the embedding's covariance is not finite, because the weights hold NaN or infinity. Choose "
            "another checkpoint."
        )
    median = float(values.quantile(0.5))
    rows = []
    for rank, value in enumerate(values.tolist()):
        rows.append((-1, "model", "embedding", rank, "eigenvalue", value, math.nan))
        ratio = value / median if median > 0 else math.inf
        rows.append((-1, "model", "embedding", rank, "eigenvalue_over_median", ratio, math.nan))
    return rows


def condition_rows(site: LayerSite) -> list[Row]:
    """Return the condition number of each projection of a layer's dense feed-forwards."""
    rows: list[Row] = []
    for feed_forward in (sublayer.feed_forward for sublayer in site.sublayers if sublayer.feed_forward is not None):
        for path, module in (*feed_forward.up, feed_forward.down):
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
                continue
            name, side = path.removeprefix(site.path + "."), feed_forward.stacked_side(module)
            for half, part in enumerate((weight,) if side is None else weight.chunk(2, side)):
                role = name if side is None else f"{name}[{half}]"
                value = condition_number(part)
                rows.append((site.index, "feed_forward", role, 0, "condition_number", value, math.nan))
    return rows


class Covariance:
    """The centered covariance [channels, channels] of samples that come batch by batch.

    Lamina subtracts the first batch's mean, multiplies in at least float32, and sums in float64. A channel with a
    massive mean therefore does not lower other channels' precision.
    """

    def __init__(self) -> None:
        self.count = 0
        self._shift = torch.zeros(())
        self._sum = torch.zeros(())
        self._products = torch.zeros(())

    def add(self, samples: torch.Tensor) -> None:
        """Add samples [..., channels]."""
        samples = samples.detach().flatten(0, -2)
        samples = samples.to(torch.promote_types(samples.dtype, torch.float32))
        if not len(samples):
            return
        if not self.count:
            channels, device = samples.shape[-1], samples.device
            self._shift = samples.mean(0)
            self._sum = torch.zeros(channels, dtype=torch.float64, device=device)
            self._products = torch.zeros(channels, channels, dtype=torch.float64, device=device)
        samples = samples - self._shift
        self._sum += samples.sum(0, dtype=torch.float64)
        self._products += samples.T @ samples
        self.count += len(samples)

    def matrix(self) -> torch.Tensor:
        """Return the sample covariance (divisor n - 1), [channels, channels] in float64. Raises ValueError for one
        sample.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, but there are {self.count}. Give more text.")
        mean = self._sum / self.count
        return (self._products - self.count * torch.outer(mean, mean)) / (self.count - 1)

    def eigenvalues(self) -> torch.Tensor:
        """Return the eigenvalues in descending order, in float64 on the CPU. Values below 1e-12 become 1e-12."""
        return torch.linalg.eigvalsh(self.matrix()).flip(0).clamp(min=FLOOR).cpu()


def hard_rank(eigenvalues: torch.Tensor) -> float:
    """Return the participation ratio of the eigenvalues, divided by the number of eigenvalues."""
    values = eigenvalues.double()
    return float(values.sum().square() / values.square().sum() / len(values))


def soft_rank(eigenvalues: torch.Tensor) -> float:
    """Return exp of the entropy of the eigenvalues, divided by the number of eigenvalues."""
    shares = eigenvalues.double() / eigenvalues.double().sum()
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()) / len(shares))


def effective_dimension_ratio(hard: float, soft: float) -> float:
    """Return 100 times the harmonic mean of the two ranks. The paper does not define this metric."""
    return 200 * hard * soft / (hard + soft)


def early_enrichment(eigenvalues: torch.Tensor) -> float:
    """Return how much of the spectrum the top eigenvalues hold, from 0 (all equal) to 1 - 1 / D for D eigenvalues.

    The paper gives no definition, so Lamina follows Marbut et al. 2023.
    """
    values = eigenvalues.double().sort(descending=True).values
    count = len(values)
    cumulated = values.cumsum(0) / values.sum()
    return float(2 / count * (cumulated - torch.arange(1, count + 1, dtype=torch.float64) / count).sum())


def spectral_utilisation(eigenvalues: torch.Tensor) -> dict[str, float]:
    hard, soft = hard_rank(eigenvalues), soft_rank(eigenvalues)
    edr = effective_dimension_ratio(hard, soft)
    return {"hard_rank": hard, "soft_rank": soft, "edr": edr, "eee": early_enrichment(eigenvalues)}


def condition_number(weight: torch.Tensor) -> float:
    """Return the largest singular value divided by the smallest, in float64, or inf for a singular matrix."""
    weight = weight.detach().double()
    # The eigenvalues of the smaller Gram matrix are the squared singular values. They are many times faster to compute.
    weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
    squares = torch.linalg.eigvalsh(weight @ weight.T)
    least, most = float(squares[0]), float(squares[-1])
    if least > 1e-10 * most:
        return math.sqrt(most / least)
    values = torch.linalg.svdvals(weight)
    smallest = float(values[-1])
    tiny = max(weight.shape) * torch.finfo(torch.float64).eps * float(values[0])
    return math.inf if smallest <= tiny else float(values[0]) / smallest


def row_covariance_eigenvalues(weight: torch.Tensor, rows: int = 8192) -> torch.Tensor:
    """Return the eigenvalues of the rows' centered covariance (divisor n - 1), descending, in float64."""
    covariance = Covariance()
    for chunk in weight.detach().split(rows):
        covariance.add(chunk.double())
    return covariance.eigenvalues()
