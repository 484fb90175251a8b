"""Finite worlds, and the encoders that a whitening JEPA learns on them, solved exactly.

Invariant: float64 and eigenvectors only; nothing is fitted. The constant function is removed before values are sorted.

A law of pairs P has marginal p and kernel K = D^-1/2 P D^-1/2, D = diag(p), with values 1 = alpha_0 >= alpha_1 >= ...
and eigenfunctions D^-1/2 v_i. Pairs of one scene (z, z' | s independent, from q(. | s)) make it positive semidefinite.
An observation is x = g(z, u), with a nuisance u that is independent of z and of other modalities; the law of its pairs
is P x R. Good views draw the nuisance anew (R = w w'). Bad views keep it with probability beta
(R = beta diag(w) + (1 - beta) w w').

Shapes: Z states, U nuisance states, X = Z U observations, S scenes, K dimensions of an encoder.
Source: the derivation in docs/theory.md, after Balestriero and LeCun (arXiv 2610.39302) and HaoChen et al. (arXiv
2106.04156).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, subspace_angles

from infra.errors import InputError

F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]

ROUNDING: Final = 1e-12
"Largest sum, asymmetry or negative eigenvalue that counts as rounding."


@dataclass(frozen=True, eq=False)
class PairLaw:
    """Probabilities of positive pairs, joint_XX[x, x']: symmetric, of sum 1, no x of probability 0.

    Raises InputError for anything else. It may be not positive semidefinite: see `is_positive`.
    """

    joint_XX: F64

    def __post_init__(self) -> None:
        joint = self.joint_XX
        if joint.ndim != 2 or joint.shape[0] != joint.shape[1] or not len(joint) or not np.isfinite(joint).all():
            message = f"A law of pairs has shape {joint.shape}, but must be a square of finite numbers P(x, x')."
            raise InputError(message)
        if joint.min() < 0 or abs(joint.sum() - 1) > ROUNDING * len(joint) or abs(joint - joint.T).max() > ROUNDING:
            asymmetry = abs(joint - joint.T).max()
            message = (
                f"A law of pairs has least entry {joint.min():.3g}, sum {joint.sum():.15g} and asymmetry "
                f"{asymmetry:.3g}, but must be nonnegative, of sum 1 and symmetric. Divide it by its sum and average "
                "it with its transpose."
            )
            raise InputError(message)
        if joint.sum(1).min() <= 0:
            raise InputError(f"State {int(joint.sum(1).argmin())} of a law of pairs never occurs. Leave it out.")

    @functools.cached_property
    def marginal_X(self) -> F64:
        """Probability of each state."""
        marginal: F64 = self.joint_XX.sum(1)
        return marginal

    @functools.cached_property
    def kernel_XX(self) -> F64:
        """D^-1/2 P D^-1/2."""
        root_X = np.sqrt(self.marginal_X)
        kernel: F64 = self.joint_XX / np.outer(root_X, root_X)
        return (kernel + kernel.T) / 2

    @functools.cached_property
    def values(self) -> F64:
        """Eigenvalues without that of the constant, descending, (X - 1,)."""
        return spectrum(self)[0]

    @property
    def is_positive(self) -> bool:
        """Whether the kernel is positive semidefinite; for pairs of one scene it is."""
        return bool(self.values.min(initial=0.0) >= -ROUNDING)


def pairs_of_scenes(weights_S: F64, states_SZ: F64) -> PairLaw:
    """The law of two independent draws from one scene: sum_s weights[s] q_s q_s', q_s = states[s], of sum 1."""
    joint_ZZ = (states_SZ * weights_S[:, None]).T @ states_SZ
    return PairLaw((joint_ZZ + joint_ZZ.T) / 2)


def random_world(rng: np.random.Generator, *, states: int, scenes: int, bandwidth: float) -> PairLaw:
    """A world of states and scenes at random points of the cube [-1, 1]^3.

    q(z | s) ~ exp(-|z - s|^2 / (2 bandwidth^2)), scene weights Dirichlet(1). Wider scenes have smaller values.
    """
    places_Z3, places_S3 = rng.uniform(-1, 1, (states, 3)), rng.uniform(-1, 1, (scenes, 3))
    squared_SZ = np.square(places_S3[:, None] - places_Z3).sum(2)
    # Distances relative to the nearest state, so that a scene far from all states does not underflow to 0.
    states_SZ = np.exp((squared_SZ.min(1, keepdims=True) - squared_SZ) / (2 * bandwidth**2))
    return pairs_of_scenes(rng.dirichlet(np.ones(scenes)), states_SZ / states_SZ.sum(1, keepdims=True))


def fresh_nuisance(weights_U: F64) -> PairLaw:
    """Good views: the nuisance is drawn anew for each view."""
    return PairLaw(np.outer(weights_U, weights_U))


def kept_nuisance(weights_U: F64, beta: float) -> PairLaw:
    """Bad views: with probability beta both views have the same nuisance. Values: beta, (U - 1) times."""
    return PairLaw(beta * np.diag(weights_U) + (1 - beta) * np.outer(weights_U, weights_U))


# --- observations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Modality:
    """A kind of observation of a world. image_ZU[z, u] = g(z, u), the number of the observation.

    Raises InputError when g is not injective, as the theorems assume.
    """

    world: PairLaw
    nuisance: PairLaw
    image_ZU: I64

    def __post_init__(self) -> None:
        wanted = (len(self.world.marginal_X), len(self.nuisance.marginal_X))
        seen = np.sort(self.image_ZU, axis=None)
        if self.image_ZU.shape != wanted or not np.array_equal(seen, np.arange(seen.size)):
            message = (
                f"A rendering of {wanted[0]} states with {wanted[1]} nuisance states shows {len(np.unique(seen))} "
                "observations, but must give each pair its own number, from 0: encoders cannot separate equal ones."
            )
            raise InputError(message)

    @functools.cached_property
    def pairs(self) -> PairLaw:
        """The law of pairs of observations, (X, X)."""
        return push_forward(self.world, self.nuisance, self.image_ZU)

    def by_state(self, f_XK: F64) -> F64:
        """f(g(z, u)) of an encoder of observations, (Z, U, K)."""
        return f_XK[self.image_ZU]


def random_modality(rng: np.random.Generator, world: PairLaw, nuisance: PairLaw) -> Modality:
    """A rendering that numbers its observations at random."""
    sizes = (len(world.marginal_X), len(nuisance.marginal_X))
    return Modality(world=world, nuisance=nuisance, image_ZU=rng.permutation(sizes[0] * sizes[1]).reshape(sizes))


def push_forward(world: PairLaw, nuisance: PairLaw, image_ZU: I64) -> PairLaw:
    """The law of pairs of observations g(z, u), for any rendering g, injective or not."""
    joint_YY = np.kron(world.joint_XX, nuisance.joint_XX)
    flat_Y, size = image_ZU.ravel(), int(image_ZU.max()) + 1
    joint_XX = np.zeros((size, size))
    np.add.at(joint_XX, (flat_Y[:, None], flat_Y[None, :]), joint_YY)
    return PairLaw(joint_XX)


# --- encoders -----------------------------------------------------------------------------------------------------


def spectrum(law: PairLaw) -> tuple[F64, F64]:
    """Values (X - 1,), descending, and eigenfunctions (X, X - 1), orthonormal under the marginal, without the constant.

    The constant is deflated. Dropping the first of a sorted list fails where other values are 1 too.
    """
    # eigh sorts ascending: the deflated constant is first, so [:0:-1] reverses all but it.
    values, vectors = eigh(_deflated(law))
    return values[:0:-1], vectors[:, :0:-1] / np.sqrt(law.marginal_X)[:, None]


def _deflated(law: PairLaw) -> F64:
    """The kernel with the constant's value moved from 1 to -2, below all others, which are in [-1, 1]."""
    root_X = np.sqrt(law.marginal_X)
    deflated: F64 = law.kernel_XX - 3 * np.outer(root_X, root_X)
    return deflated


def whitening_jepa(law: PairLaw, dims: int) -> F64:
    """The encoder of `dims` dimensions that minimises E|f(x) - f(x')|^2 under E f = 0 and Cov f = I, (X, K).

    It is the spectral embedding (Laplacian eigenmaps); unique up to a rotation when values[dims - 1] > values[dims].
    Raises InputError when the law has fewer dimensions.
    """
    last = len(law.marginal_X) - 1
    if not 1 <= dims <= last:
        raise InputError(f"An encoder on {last + 1} states has 1 to {last} dimensions beside the constant, not {dims}.")
    # Computing the wanted vectors only takes half of the time.
    vectors_XK = eigh(_deflated(law), subset_by_index=(last - dims + 1, last))[1][:, ::-1]
    return np.asarray(vectors_XK / np.sqrt(law.marginal_X)[:, None])


def jepa_loss(law: PairLaw, f_XK: F64) -> float:
    """E|f(x) - f(x')|^2 over positive pairs; for the closed form 2 sum_i (1 - alpha_i)."""
    squares = law.marginal_X @ np.square(f_XK).sum(1)
    return float(2 * squares - 2 * np.einsum("xk,xy,yk->", f_XK, law.joint_XX, f_XK))


def covariance(marginal_X: F64, f_XK: F64) -> F64:
    """Covariance under the marginal, (K, K)."""
    centred_XK = f_XK - marginal_X @ f_XK
    return centred_XK.T @ (marginal_X[:, None] * centred_XK)


def whitened(marginal_X: F64, f_XK: F64) -> F64:
    """`f` centred and multiplied by Cov^-1/2, to covariance I. Raises InputError when Cov is singular."""
    values, vectors = np.linalg.eigh(covariance(marginal_X, f_XK))
    if values[0] <= ROUNDING * max(values[-1], 1e-300):
        message = (
            f"An encoder uses fewer than its {len(values)} dimensions (variances {values[0]:.3g} to {values[-1]:.3g}): "
            "it has collapsed and cannot be whitened."
        )
        raise InputError(message)
    white: F64 = (f_XK - marginal_X @ f_XK) @ (vectors / np.sqrt(values)) @ vectors.T
    return white


# --- two modalities -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shown:
    """A whitened encoder averaged over its nuisance: mean_ZK = E[f | z], and square = E|f|^2, which is K."""

    marginal_Z: F64
    mean_ZK: F64
    square: float

    @property
    def lost(self) -> float:
        """E|f|^2 - E|E[f | z]|^2: the number of dimensions that encode the nuisance; invariant under rotation."""
        return self.square - float(self.marginal_Z @ np.square(self.mean_ZK).sum(1))


def shown(modality: Modality, f_XK: F64) -> Shown:
    """The encoder of a modality, averaged over its nuisance."""
    f_ZUK, weights_U = modality.by_state(f_XK), modality.nuisance.marginal_X
    marginal_Z = modality.world.marginal_X
    square = float(np.einsum("z,u,zuk->", marginal_Z, weights_U, np.square(f_ZUK)))
    return Shown(marginal_Z, np.einsum("u,zuk->zk", weights_U, f_ZUK), square)


def alignment_error(left: Shown, right: Shown) -> float:
    """min over rotations Q of E|f - Q f'|^2, nuisances independent: E|f|^2 + E|f'|^2 - 2 |E f f'^T|_nuclear."""
    # Independent nuisances: E f f'^T is that of the means by state. Its nuclear norm is the maximum over Q.
    cross_KK = left.mean_ZK.T @ (left.marginal_Z[:, None] * right.mean_ZK)
    return left.square + right.square - 2 * float(np.linalg.svd(cross_KK, compute_uv=False).sum())


def principal_angles(marginal_X: F64, f_XK: F64, g_XK: F64) -> F64:
    """Angles between the spans of two encoders of the same states, in degrees, ascending, (K,)."""
    # Times the root of the marginal, the Euclidean angles are those of functions under the marginal.
    root_X1 = np.sqrt(marginal_X)[:, None]
    radians: F64 = subspace_angles(root_X1 * whitened(marginal_X, f_XK), root_X1 * whitened(marginal_X, g_XK))
    return np.degrees(radians[::-1])
