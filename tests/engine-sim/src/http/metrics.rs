//! `/metrics` with vLLM's names and labels.

use crate::engine::{Engine, lock};
use std::fmt::Write;

pub(super) fn render(engine: &Engine) -> String {
    let config = &engine.config;
    let (counts, in_use, usable, asleep) = engine.inspect(|scheduler| {
        (scheduler.counts(), scheduler.pool().in_use(), scheduler.pool().usable(), scheduler.is_asleep())
    });
    let (mm_queries, mm_hits) = {
        let media = lock(&engine.media);
        (media.queries, media.hits)
    };
    #[expect(clippy::cast_precision_loss, reason = "block counts are far below 2^53")]
    let usage = in_use as f64 / usable as f64;
    let labels = format!("engine=\"0\",model_name=\"{}\"", config.model_name);
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, more: &str, value: f64| {
        // Writing to a String cannot fail.
        let base = name.strip_suffix("_total").unwrap_or(name);
        let _ = writeln!(out, "# HELP vllm:{name} vLLM's {base}.\n# TYPE vllm:{name} {kind}");
        let _ = writeln!(out, "vllm:{name}{{{labels}{more}}} {value:?}");
    };
    #[expect(clippy::cast_precision_loss, reason = "counters stay far below 2^53")]
    let float = |n: u64| n as f64;
    family("num_requests_running", "gauge", "", float(counts.running as u64));
    family("num_requests_waiting", "gauge", "", float(counts.waiting as u64));
    family("kv_cache_usage_perc", "gauge", "", usage);
    family("engine_sleep_state", "gauge", ",sleep_state=\"awake\"", f64::from(u8::from(!asleep)));
    family("prefix_cache_queries_total", "counter", "", float(counts.prompt_tokens));
    family("prefix_cache_hits_total", "counter", "", float(counts.cached_tokens));
    family("mm_cache_queries_total", "counter", "", float(mm_queries));
    family("mm_cache_hits_total", "counter", "", float(mm_hits));
    family("num_preemptions_total", "counter", "", float(counts.preemptions));
    family("prompt_tokens_total", "counter", "", float(counts.prompt_tokens));
    family("prompt_tokens_cached_total", "counter", "", float(counts.cached_tokens));
    family("generation_tokens_total", "counter", "", float(counts.generated_tokens));
    family("request_success_total", "counter", ",finished_reason=\"length\"", float(counts.served));
    let (size, blocks) = (config.block_size, config.blocks);
    let _ = writeln!(
        out,
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n\
         # TYPE vllm:cache_config_info gauge\n\
         vllm:cache_config_info{{block_size=\"{size}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"0\",\
         hash_block_size=\"None\",kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{blocks}\",\
         prefix_caching_hash_algo=\"{}\",prefix_match_unit=\"None\",sliding_window=\"None\"}} 1.0",
        size * blocks,
        config.hash_algo.name(),
    );
    out
}
