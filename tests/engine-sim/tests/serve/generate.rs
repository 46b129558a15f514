//! Generation, its errors, and the paths around it.

use crate::client::{chat, completion, config, get, image_request, post, send, start, text};
use engine_sim::Sim;
use serde_json::{Value, json};

#[tokio::test]
async fn a_repeated_image_request_hits_the_cache() {
    let sim = start().await;
    let request = image_request("big_448x320.jpg", "What is in this picture?");
    let first = chat(&sim, &request).await;
    let second = chat(&sim, &request).await;
    let details = |answer: &Value| answer["usage"]["prompt_tokens_details"].clone();
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let full = (prompt - 1) / 16 * 16;
    assert_eq!(
        details(&first),
        json!({"cached_tokens": 0, "created_cache_tokens": full, "multimodal_tokens": {"image": 140}})
    );
    assert_eq!(details(&second)["cached_tokens"], full);
    assert_eq!(first["choices"], second["choices"], "text is fixed by the prompt");
    let counts = sim.state().counts;
    assert_eq!((counts.served, counts.images_encoded), (2, 1));
    assert_eq!((counts.prompt_tokens, counts.cached_tokens), (2 * prompt, full));
}

#[tokio::test]
async fn a_client_uuid_is_the_identity() {
    let sim = start().await;
    let mut request = image_request("a_96x64.png", "What is in this picture?");
    request["messages"][0]["content"][0]["uuid"] = json!("00c0ffee12345678");
    chat(&sim, &request).await;
    request["messages"][0]["content"][0]["image_url"] = Value::Null;
    let answer = chat(&sim, &request).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    let (status, rendered) = post(&sim, "/v1/chat/completions/render", &request).await;
    assert_eq!((status, &rendered["features"]["mm_hashes"]["image"][0]), (200, &json!("00c0ffee12345678")));
}

#[tokio::test]
async fn a_stream_has_role_tokens_usage_and_end() {
    let sim = start().await;
    let mut request = image_request("a_96x64.png", "What is it?");
    let whole = chat(&sim, &request).await;
    request["stream"] = json!(true);
    request["stream_options"] = json!({"include_usage": true});
    request["return_token_ids"] = json!(true);
    let response = send(&sim, "POST", "/v1/chat/completions", request.to_string()).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let stream = text(response).await;
    let events: Vec<&str> = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let events: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events.len(), 1 + 4 + 1);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events[0]["prompt_token_ids"].as_array().unwrap().len() as u64, whole["usage"]["prompt_tokens"]);
    let content: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], content);
    assert_eq!(events[4]["choices"][0]["finish_reason"], "length");
    assert_eq!(events[5]["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn several_answers_and_prompts_are_indexed() {
    let sim = start().await;
    let (first, second) = (completion(1, 40, 3), completion(2, 40, 3));
    let body = json!({"model": "tiny-vl", "prompt": [first["prompt"], second["prompt"]], "n": 2, "max_tokens": 3});
    let (_, answer) = post(&sim, "/v1/completions", &body).await;
    let indices: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|choice| choice["index"].clone()).collect();
    assert_eq!(indices, [0, 1, 2, 3].map(Value::from));
    assert_eq!(answer["usage"]["prompt_tokens"], 80);
    // The second answer of each prompt shares the blocks of the first.
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
}

#[tokio::test]
async fn answers_are_cached_too() {
    let sim = start().await;
    let (_, answer) = post(&sim, "/v1/completions", &{
        let mut body = completion(1, 40, 30);
        body["return_token_ids"] = json!(true);
        body
    })
    .await;
    let mut longer = completion(1, 40, 1);
    let output = answer["choices"][0]["token_ids"].as_array().unwrap().clone();
    longer["prompt"].as_array_mut().unwrap().extend(output);
    let (_, answer) = post(&sim, "/v1/completions", &longer).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
}

#[tokio::test]
async fn errors_are_shaped_as_vllm_shapes_them() {
    let sim = Sim::start(engine_sim::SimConfig { max_images: 1, ..config() }).await.unwrap();
    let bad_image = |url: &str| {
        let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
        json!({"model": "tiny-vl", "messages": [{"role": "user", "content": content}]})
    };
    let unknown = json!([{"type": "image_url", "image_url": null, "uuid": "f"}]);
    let mut two = image_request("a_96x64.png", "x");
    let part = two["messages"][0]["content"][0].clone();
    two["messages"][0]["content"].as_array_mut().unwrap().push(part);
    let rows = [
        (json!({"model": "nope", "messages": []}), 404, "The model `nope` does not exist. Valid aliases: tiny-vl."),
        (json!({"model": "tiny-vl"}), 400, "messages"),
        (bad_image("data:image/png;base64,AAAA"), 400, "cannot identify image file"),
        (bad_image("http://127.0.0.1:1/x.png"), 422, "Failed to fetch media from URL"),
        (two, 400, "At most 1 image(s) may be provided in one prompt. (parameter=image)"),
        (json!({"model": "tiny-vl", "messages": [{"role": "user", "content": null}]}), 200, ""),
        (
            json!({"model": "tiny-vl", "messages": [{"role": "user", "content": null}], "max_tokens": 0}),
            400,
            "at least 1",
        ),
        (
            json!({"model": "tiny-vl", "messages": [{"role": "user", "content": null}], "max_tokens": 5000}),
            400,
            "maximum context length is 4096 tokens",
        ),
        (json!({"model": "tiny-vl", "messages": [{"role": "user", "content": null}, 1]}), 400, "object"),
        (
            json!({"messages": [{"role": "user", "content": null}], "mm_processor_kwargs": {"a": 1}}),
            400,
            "disabled by default",
        ),
        (json!({"messages": [{"role": "user", "content": null}], "n": 1000}), 400, "n must be"),
        (
            json!({"messages": [{"role": "user", "content": unknown}]}),
            400,
            "Cache miss for image at index 0 but data is not provided.",
        ),
    ];
    for (body, status, message) in rows {
        let (got, answer) = post(&sim, "/v1/chat/completions", &body).await;
        assert_eq!(got, status, "{answer}");
        if status != 200 {
            assert_eq!(answer["error"]["code"], status);
            assert!(answer["error"]["message"].as_str().unwrap().contains(message), "{answer}");
        }
    }
    let response = send(&sim, "POST", "/v1/completions", "{\"prompt\": ".to_owned()).await.unwrap();
    assert_eq!(response.status(), 400);
    let long = completion(1, 4096, 1);
    let (_, answer) = post(&sim, "/v1/completions", &long).await;
    assert_eq!(answer["error"]["param"], "input_tokens");
}

#[tokio::test]
async fn the_engine_describes_itself() {
    let sim = start().await;
    let models: Value = serde_json::from_str(&get(&sim, "/v1/models").await).unwrap();
    let card = &models["data"][0];
    assert_eq!((&card["root"], &card["max_model_len"]), (&json!("./tiny-qwen3-vl"), &json!(4096)));
    assert_eq!((&models["data"][1]["id"], &models["data"][1]["parent"]), (&json!("lora1"), &json!("tiny-vl")));
    let sources: Value = serde_json::from_str(&get(&sim, "/kv_event_sources").await).unwrap();
    let port = sim.events.rsplit(':').next().unwrap();
    assert_eq!(sources["0"]["endpoint"], format!("tcp://*:{port}"));
    assert_eq!(sources["0"]["replay_endpoint"], sim.replay);
    post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
    let metrics = get(&sim, "/metrics").await;
    for line in [
        "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"tiny-vl\"} 40.0",
        "vllm:num_requests_running{engine=\"0\",model_name=\"tiny-vl\"} 0.0",
        "block_size=\"16\"",
        "num_gpu_blocks=\"1024\"",
        "prefix_caching_hash_algo=\"sha256_cbor\"",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert_eq!(get(&sim, "/health").await, "");
    assert!(get(&sim, "/version").await.contains("0.32"));
    assert!(get(&sim, "/nothing").await.contains("Not Found"));
}
