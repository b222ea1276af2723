"""Random plans of small models, down to the fewest buffers with which a step can be computed."""

from hypothesis import strategies as st
from small_models import llama_model

from llmb.config.model import Model
from llmb.config.offload_plan import Plan
from llmb.perfmodel.offload.buffers import ParamBuckets


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Small Llamas whose vocabulary is one part, or several."""
    return llama_model(
        layers=draw(st.integers(1, 5)),
        vocab=draw(st.sampled_from((100, 300, 700))),
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def plans(draw: st.DrawFn, model: Model) -> Plan:
    """Any plan of the model that can be computed."""
    long = draw(st.booleans())
    seqlen = draw(st.integers(2, 12))
    seqs_per_group = 1 if long else draw(st.integers(1, 3))
    chunk_tokens = draw(st.integers(1, seqlen)) if long else seqlen * seqs_per_group
    groups_per_round = draw(st.integers(1, 3))
    chunks = groups_per_round * -(-seqlen * seqs_per_group // chunk_tokens)
    levels = draw(st.text("FAI", min_size=model.layers * chunks, max_size=model.layers * chunks))
    buckets = ParamBuckets(model)
    resident = {kind: draw(st.integers(0, buckets.count)) for kind in ("params", "grads", "states")}
    least = {"param": buckets.vocab_shards, "grad": buckets.vocab_shards, "state": 1}
    passing = {f"{kind}_blocks": count + draw(st.integers(0, 3)) for kind, count in least.items()}
    for kind, count in resident.items():
        if count == buckets.count:
            passing[f"{kind[:-1]}_blocks"] = 0
    return Plan(
        dtype="fp32", seqlen=seqlen, gbs=draw(st.integers(1, 6)), chunk_tokens=chunk_tokens,
        seqs_per_group=seqs_per_group, groups_per_round=groups_per_round, loss_tokens=draw(st.integers(1, 8)),
        update="master", update_at=draw(st.sampled_from(("forward", "backward"))),
        resident_params=resident["params"], resident_grads=resident["grads"], resident_states=resident["states"],
        **passing, inp_slots=2 + draw(st.integers(0, 4)), kv_slots=1 + draw(st.integers(0, 4)),
        attn_slots=1 + draw(st.integers(0, 3)), rest_slots=1 + draw(st.integers(0, 3)), levels=levels,
    )  # fmt: skip
