"""Which phonemes each letter of a word stands for, learned from words and their pronunciations alone.

Each letter stands for a chunk of 0, 1 or 2 phonemes, one chunk after the other, with a probability that depends on
the letter only. Expectation-maximisation finds these probabilities: all ways to cut a pronunciation into chunks are
weighed with the probabilities so far, and the weights counted give new ones. The likeliest cut is the alignment.

L is the number of letters of a word, P that of its phonemes, n that of words of equal L and equal P.
"""

from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

LONGEST_CHUNK = 2
ROUNDS = 8  # of expectation-maximisation


class Group(NamedTuple):
    """Words of equally many letters with equally many phonemes."""

    places: np.ndarray  # [n], where the words stand in the list they come from
    letters: np.ndarray  # [n, L]
    chunks: List[np.ndarray]  # for each size k of a chunk, those that begin at each phoneme, [n, P + 1 - k]


def align(letters: Sequence[np.ndarray], phonemes: Sequence[np.ndarray], kinds: int) -> List[np.ndarray]:
    """The chunk, by number, that each letter of each word stands for: [L] for every word.

    `letters` and `phonemes` have an array of ids for each word, no word more than `LONGEST_CHUNK` phonemes a letter;
    `kinds` is how many different phonemes there are.
    """
    groups = grouped(letters, phonemes, kinds)
    probabilities = np.ones([1 + max(int(word.max()) for word in letters), 1 + kinds + kinds * kinds])
    for _ in range(ROUNDS):
        counts = sum(expected_counts(group, probabilities) for group in groups)
        probabilities = counts / counts.sum(axis=1, keepdims=True).clip(min=1)  # a letter of no word has no counts
    aligned = {
        place: chunks for group in groups for place, chunks in zip(group.places, likeliest(group, probabilities))
    }
    return [aligned[place] for place in range(len(letters))]


def chunks_of(phonemes: np.ndarray, kinds: int) -> List[np.ndarray]:
    """The chunks of 0, 1 and 2 phonemes that begin at each place of `phonemes` [n, P], and for 0 behind it.

    No phoneme is chunk 0; phoneme p is 1 + p; p followed by q is 1 + kinds + p * kinds + q.
    """
    nothing = np.zeros([len(phonemes), phonemes.shape[1] + 1], dtype=np.int64)
    return [nothing, 1 + phonemes, 1 + kinds + phonemes[:, :-1] * kinds + phonemes[:, 1:]]


def phonemes_of(chunk: int, kinds: int) -> Tuple[int, ...]:
    if chunk == 0:
        return ()
    return (chunk - 1,) if chunk <= kinds else divmod(chunk - 1 - kinds, kinds)


def grouped(letters: Sequence[np.ndarray], phonemes: Sequence[np.ndarray], kinds: int) -> List[Group]:
    places: Dict[Tuple[int, int], List[int]] = {}
    for place, (word, said) in enumerate(zip(letters, phonemes)):
        places.setdefault((len(word), len(said)), []).append(place)
    return [
        Group(
            np.array(chosen),
            np.stack([letters[place] for place in chosen]),
            chunks_of(np.stack([phonemes[place] for place in chosen]).astype(np.int64), kinds),
        )
        for chosen in places.values()
    ]


def expected_counts(group: Group, probabilities: np.ndarray) -> np.ndarray:
    """How often each letter stands for each chunk, every cut counted by its share; shaped as `probabilities`."""
    weights = chunk_weights(group, probabilities)
    positions = group.chunks[0].shape[1]  # P + 1
    # before[i][:, j]: that the first i letters stand for the first j phonemes; after[:, j]: that the rest does
    before = [np.eye(1, positions).repeat(len(group.letters), axis=0)]
    for of_letter in weights:
        following = np.zeros_like(before[0])
        for size, weight in enumerate(of_letter):
            following[:, size:] += before[-1][:, : positions - size] * weight
        before.append(following)
    total = before[-1][:, -1:]
    after = before[0][:, ::-1]
    counts = np.zeros(probabilities.size)
    for i in reversed(range(len(weights))):
        preceding = np.zeros_like(after)
        for size, weight in enumerate(weights[i]):
            onwards = weight * after[:, size:]
            preceding[:, : positions - size] += onwards
            cells = group.letters[:, i : i + 1] * probabilities.shape[1] + group.chunks[size]
            shares = before[i][:, : positions - size] * onwards / total
            counts += np.bincount(cells.ravel(), shares.ravel(), minlength=counts.size)
        after = preceding
    return counts.reshape(probabilities.shape)


def likeliest(group: Group, probabilities: np.ndarray) -> np.ndarray:
    """The chunks of the likeliest cut of every word, [n, L]."""
    positions = group.chunks[0].shape[1]
    best = np.eye(1, positions).repeat(len(group.letters), axis=0)
    sizes = []  # sizes[i][:, j]: of the chunk of letter i, where it ends before phoneme j
    for of_letter in chunk_weights(group, probabilities):
        ways = np.zeros([len(of_letter), *best.shape])
        for size, weight in enumerate(of_letter):
            ways[size, :, size:] = best[:, : positions - size] * weight
        best = ways.max(axis=0)
        sizes.append(ways.argmax(axis=0))
    rows = np.arange(len(group.letters))
    end = np.full(len(rows), positions - 1)
    cut = np.empty(group.letters.shape, dtype=np.int64)
    for i in reversed(range(len(sizes))):
        size = sizes[i][rows, end]
        end = end - size  # where the chunk begins
        for kind, chunks in enumerate(group.chunks):
            here = size == kind
            cut[here, i] = chunks[rows[here], end[here]]
    return cut


def chunk_weights(group: Group, probabilities: np.ndarray) -> List[List[np.ndarray]]:
    """For each letter and each size k, the probability of the chunk that begins at each phoneme: [n, P + 1 - k]."""
    columns = group.letters.T[:, :, np.newaxis]
    return [[probabilities[letter, chunks] for chunks in group.chunks] for letter in columns]
