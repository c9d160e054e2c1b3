"""Samples of a model, from the end of a text on."""
# slow: slow_replica
# limit: 180
import dataclasses
import os
import time

import numpy as np

import harness
import reference
import test_saving

MESHES = (1, {}), (2, dict(tp=2)), (2, dict(dp=2, micro_batch=4)), (2, dict(tp=2, strategy="up"))
END_OF_TEXT = 19


def logits(shape, model, tokens):
    """Of what follows each of the tokens."""
    inputs = np.array([tokens])
    probabilities = reference.forward(shape, model, inputs, inputs)[1][-1]
    return np.log(probabilities[0])


class Sample(harness.Case):
    def sample(self, ranks=1, **more):
        log, result = self.train(ranks, **{**dict(train=None, steps=0, sample_every=1, sample_tokens=12), **more})
        (event,) = harness.events(log, "sample")
        self.assertTrue(event["text"] in result.out, str(result))
        return event["text"]

    def test_a_slow_replica_is_waited_for(self):
        """It takes longer for the whole text than the limit, and than the other one, which may wait for a token at a time."""
        shim, begin, limit = test_saving.build_shim(self, "train/preload_disk.c"), time.monotonic(), 6
        result = harness.run(self.arguments(dp=2, micro_batch=4, steps=0, train=None, sample_every=1, sample_tokens=25, timeout=limit),
                             2, env=dict(LD_PRELOAD=shim, FULL_RANK="1", PRODUCT_MS="10"))
        self.assertEqual(result.status, 0, str(result))
        self.assertGreater(time.monotonic() - begin, 1.5 * limit)

    def vocabulary(self):
        """Words that name their token, beside a copy of the model, whose name is returned."""
        folder = self.fresh("model")
        os.mkdir(folder)
        reference.write_model(os.path.join(folder, "model.bin"), self.shape, self.parameters)
        words = [b"<%d>" % token for token in range(self.shape.V)]
        with open(os.path.join(folder, "tokenizer.bin"), "wb") as file:
            file.write(reference.header(20240328, 2, len(words), END_OF_TEXT))
            file.write(b"".join(bytes([len(word)]) + word for word in words))
        return os.path.join(folder, "model.bin")

    def test_the_most_likely_tokens_are_numpys(self):
        tokens = [END_OF_TEXT]
        for _ in range(12):
            tokens.append(int(logits(self.shape, self.parameters, tokens)[-1].argmax()))
        expected = "".join(f"<{token}>" for token in tokens[1:])
        model = self.vocabulary()
        for ranks, mesh in MESHES:
            with self.subTest(**mesh):
                self.assertEqual(self.sample(ranks, init_from=model, temperature=0, **mesh), expected)
        self.assertEqual(self.sample(init_from=model, top_k=1), expected)

    def test_top_k_and_temperature(self):
        model = self.vocabulary()

        def ranks_of(**more):
            """Of each token drawn, how many were more likely."""
            text = self.sample(init_from=model, sample_tokens=24, **more)
            tokens = [END_OF_TEXT, *map(int, text.strip("<>").split("><"))]
            self.assertEqual(len(tokens), 25)
            found = logits(self.shape, self.parameters, tokens)
            return [int((found[i - 1] > found[i - 1][tokens[i]]).sum()) for i in range(1, len(tokens))]
        drawn = ranks_of(top_k=3)
        self.assertTrue(max(drawn) <= 2 and max(drawn) > 0, drawn)
        self.assertGreater(max(ranks_of()), 2)
        self.assertEqual(max(ranks_of(temperature=1e-4)), 0)
        self.assertGreater(sum(ranks_of(temperature=10)), sum(ranks_of(temperature=0.3)))
        self.assertEqual(self.sample(init_from=model), self.sample(init_from=model, seed=1337))
        self.assertNotEqual(self.sample(init_from=model), self.sample(init_from=model, seed=1338))

    def test_a_prompt(self):
        """Is continued as numpy continues it, on every mesh, given as words or as numbers; and asks for a sample by itself."""
        model, prompt = self.vocabulary(), [5, 77, 19, 100, 5]
        tokens, text, file = list(prompt), "".join(f"<{token}>" for token in prompt), self.fresh("prompt")
        for _ in range(12):
            tokens.append(int(logits(self.shape, self.parameters, tokens)[-1].argmax()))
        expected = "".join(f"<{token}>" for token in tokens)
        with open(file, "w") as out:
            out.write("5, 77 19\n100,5\n")
        for ranks, mesh in MESHES:
            for given in dict(prompt=text), dict(prompt_tokens=file):
                with self.subTest(**mesh, **given):
                    self.assertEqual(self.sample(ranks, init_from=model, temperature=0, sample_every=0, **mesh, **given), expected)
        log, _ = self.train(init_from=model, prompt=text, steps=4, sample_every=2)
        self.assertEqual([event["step"] for event in harness.events(log, "sample")], [2, 4])
        self.assertTrue(all(event["text"].startswith(text) for event in harness.events(log, "sample")))
        log, _ = self.train(init_from=model, prompt=text, steps=4)
        self.assertEqual([event["step"] for event in harness.events(log, "sample")], [4])

    def test_a_prompt_of_bytes_as_long_as_the_context(self):
        shape = dataclasses.replace(self.shape, V=256, Vp=256)
        prompt, model = "What is read by a model of bytes: \u00e9", self.fresh("model.bin")
        self.assertEqual(len(prompt.encode()), self.T)
        for seed in range(99):  # weights whose answer a terminal shows
            parameters = reference.random_model(shape, seed=seed)
            following = int(logits(shape, parameters, list(prompt.encode()))[-1].argmax())
            if 32 < following < 127:
                break
        reference.write_model(model, shape, parameters)
        self.assertEqual(self.sample(init_from=model, temperature=0, prompt=prompt, sample_tokens=1), prompt + chr(following))

    def test_prompts_that_are_refused(self):
        file = self.fresh("prompt")
        for words, given, content in (
                (("37 tokens", "--seq is 36"), dict(prompt="a" * 37), None), (("token 1 of the prompt is 122",), dict(prompt="az"), None),
                (("leave out", "--prompt-tokens"), dict(prompt="a", prompt_tokens=file), "1"), (("0 tokens",), dict(prompt_tokens=file), ""),
                (("no such file",), dict(prompt_tokens=file + "0"), None), (("byte 2 ",), dict(prompt_tokens=file), "1 x"),
                (("byte 1 ",), dict(prompt_tokens=file), "1\0 2"), (("byte 0 ",), dict(prompt_tokens=file), "-1"),
                (("token 0 of the prompt is 101",), dict(prompt_tokens=file), "101")):
            with self.subTest(**given, content=content), open(file, "w") as out:
                out.write(content or "")
                out.flush()
                for ranks in 1, 2:
                    result = harness.run(self.arguments(train=None, steps=0, dp=ranks, batch=None, **given), ranks)
                    self.assertFails(result, *words)
                    self.assertEqual(result.err.count("error:"), 1, str(result))
