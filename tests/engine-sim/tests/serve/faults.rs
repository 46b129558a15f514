//! Disconnects, failures and the end of an engine.

use crate::client::{completion, config, get, post, send, start};
use engine_sim::{Fault, Sim, SimConfig};
use http_body_util::BodyExt;
use serde_json::{Value, json};

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_aborts() {
    let sim = start().await;
    sim.fault(Fault::Stall).await;
    let body = completion(1, 100, 50).to_string();
    tokio::select! {
        _ = send(&sim, "POST", "/v1/completions", body) => panic!("a stalled engine answers nothing"),
        _ = sim.wait_for(|state| state.counts.waiting == 1) => {}
    }
    let state = sim.wait_for(|state| state.counts.aborted == 1).await;
    sim.fault(Fault::Resume).await;
    assert_eq!((state.counts.waiting, state.counts.generated_tokens), (0, 0));
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_aborts_before_its_end() {
    // 100 tokens take 100 s here, so that only the abort can end the step's job in time.
    let sim = Sim::start(SimConfig { speed: 1.0, prefill_tps: 1.0, ..config() }).await.unwrap();
    let body = completion(1, 100, 50).to_string();
    tokio::select! {
        _ = send(&sim, "POST", "/v1/completions", body) => panic!("prefill is slow"),
        _ = sim.wait_for(|state| state.counts.running == 1) => {}
    }
    let state = sim.wait_for(|state| state.counts.aborted == 1).await;
    assert_eq!((state.counts.running, state.counts.generated_tokens), (0, 0));
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_aborts() {
    let sim = Sim::start(SimConfig { speed: 1.0, decode_ms: 20.0, ..config() }).await.unwrap();
    let mut body = completion(1, 100, 3000);
    body["stream"] = json!(true);
    let mut response = send(&sim, "POST", "/v1/completions", body.to_string()).await.unwrap();
    response.body_mut().frame().await.unwrap().unwrap();
    sim.fault(Fault::Stall).await;
    let before = sim.state().counts.generated_tokens;
    drop(response);
    let state = sim.wait_for(|state| state.counts.aborted == 1).await;
    assert_eq!(state.counts.running, 0);
    assert!(state.counts.generated_tokens <= before + 1, "at most the step in progress ends");
}

#[tokio::test]
async fn asked_for_errors_are_counted_down() {
    let sim = start().await;
    post(&sim, "/sim/fault", &json!({"fault": "error", "count": 1, "status": 503})).await;
    assert_eq!(post(&sim, "/v1/completions", &completion(1, 20, 1)).await.0, 503);
    assert_eq!(post(&sim, "/v1/completions", &completion(1, 20, 1)).await.0, 200);
    assert_eq!(post(&sim, "/sim/fault", &json!({"fault": "nonsense"})).await.0, 400);
}

#[tokio::test]
async fn a_restart_fails_what_is_in_flight() {
    let sim = start().await;
    sim.fault(Fault::Stall).await;
    let body = completion(1, 100, 50);
    let ((status, answer), ()) = tokio::join!(post(&sim, "/v1/completions", &body), async {
        sim.wait_for(|state| state.counts.waiting == 1).await;
        sim.fault(Fault::Restart).await;
    });
    assert_eq!((status, &answer["error"]["type"]), (500, &json!("InternalServerError")));
}

#[tokio::test]
async fn a_dead_engine_cuts_its_connections() {
    let sim = start().await;
    sim.fault(Fault::Stall).await;
    let body = completion(1, 100, 50).to_string();
    let (answer, ()) = tokio::join!(send(&sim, "POST", "/v1/completions", body), async {
        sim.wait_for(|state| state.counts.waiting == 1).await;
        sim.fault(Fault::Die).await;
    });
    assert!(answer.is_err());
    assert!(sim.ended().await);
    assert!(send(&sim, "GET", "/health", String::new()).await.is_err());
}

#[tokio::test]
async fn state_can_be_waited_for_over_http() {
    let sim = start().await;
    let (state, _) = tokio::join!(get(&sim, "/sim/state?served=2&next_seq=2"), async {
        post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
        post(&sim, "/v1/completions", &completion(2, 40, 1)).await;
    });
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!((&state["served"], state["cached_blocks"].as_array().unwrap().len()), (&json!(2), 4));
}

#[tokio::test]
async fn full_pools_preempt_and_still_serve() {
    let small = SimConfig { blocks: 9, max_model_len: 120, ..config() };
    let sim = Sim::start(small).await.unwrap();
    let bodies: Vec<_> = (0..4).map(|salt| completion(salt, 40, 60)).collect();
    let answers = futures_util::future::join_all(bodies.iter().map(|body| post(&sim, "/v1/completions", body))).await;
    assert!(answers.iter().all(|(status, answer)| *status == 200 && answer["usage"]["completion_tokens"] == 60));
    assert!(sim.state().counts.preemptions > 0);
}
