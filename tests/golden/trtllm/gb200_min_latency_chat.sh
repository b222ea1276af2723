set -euo pipefail
: "${WEIGHTS:?set it to the folder of the weights}"
cat > trtllm.yaml <<'END'
enable_attention_dp: false
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.1, enable_block_reuse: false}
enable_chunked_prefill: true
stream_interval: 4
print_iter_log: true
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1]
moe_config: {backend: TRTLLM}
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3, use_relaxed_acceptance_for_thinking: true, relaxed_topk: 10, relaxed_delta: 0.6}
END
trtllm-bench --model "$WEIGHTS" prepare-dataset --output dataset.jsonl --random-seed 1234 token-norm-dist --num-requests 10 --input-mean 128 --output-mean 128 --input-stdev 0 --output-stdev 0
exec trtllm-bench --model DeepSeek-R1 --model_path "$WEIGHTS" throughput --backend pytorch --tp 4 --ep 1 --pp 1 --dataset dataset.jsonl --max_batch_size 1 --max_num_tokens 128 --num_requests 10 --concurrency 1 --warmup 0 --extra_llm_api_options trtllm.yaml --streaming
