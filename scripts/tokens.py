"""Random tokens to train on."""
import array
import random


def write_tokens(path, count, vocabulary, seed=7):
    """Writes an llm.c token file with something to learn: each token is one of four successors of the token before it. Frequencies
    are as uneven as those of words (of 50257, the most frequent has 5 %), so embeddings sum long runs of one token. Returns the
    tokens."""
    draw = random.Random(seed)
    tokens = draw.sample(range(vocabulary), vocabulary)
    drawn = draw.choices(tokens, [1 / (rank + 2) for rank in range(vocabulary)], k=4 * vocabulary)
    text, token = array.array("H"), tokens[0]
    for _ in range(count):
        text.append(token)
        token = drawn[4 * token + draw.randrange(4)]
    with open(path, "wb") as file:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
        text.tofile(file)
    return text
