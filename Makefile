# The two commands set everything up themselves, inside this checkout:
#   make demo   beam search with a real language model; ARGS="--beams 4 --verify" for its options
#   make test   every check that CI runs
# PYTHON=... names the Python to use; EXTRAS=demo,gpu lets the demo run on an NVIDIA GPU.

EXTRAS = demo
export PYTHON

.PHONY: demo test native clean

demo:
	@tools/venv.sh .venv $(EXTRAS)
	@.venv/bin/python -m jax_beam_attn demo $(ARGS)

test:
	@tools/test.sh

native:
	@tools/venv.sh .venv-oldest test jax==0.11.2 jaxlib==0.11.2
	@tools/native.sh .venv-oldest

clean:
	rm -rf .venv .venv-oldest .venv-newest build jax_beam_attn/_native
