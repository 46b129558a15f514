//! Engines without a sidecar, by URL: routed by what was sent where, told nothing of ours, and gone when they are down.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::Duration;

use e2e::client::Answer;
use e2e::{Fleet, FleetConfig, Mode, eventually};
use serde_json::{Value, json};

/// A balancer whose workers are bare engines; the first fleet only keeps these.
async fn start(count: usize, mode: Mode, worker: &str) -> (Fleet, Fleet) {
    let mut engines = Fleet::without_workers(FleetConfig::tiny(0, Mode::Precise)).await.unwrap();
    let mut extra = String::from("workers:\n");
    for index in 0..count {
        let engine = engines.start_engine(index, 0).await.unwrap();
        extra += &format!("  - {{url: \"http://{}\"{worker}}}\n", engine.addr("http").unwrap());
        engines.engines.push(engine);
    }
    let config = FleetConfig { balancer_extra: extra, ..FleetConfig::tiny(0, mode) };
    let fleet = Fleet::without_workers(config).await.unwrap();
    up(&fleet, count).await;
    (engines, fleet)
}

/// Waits until the balancer counts `count` workers.
async fn up(fleet: &Fleet, count: usize) {
    let url = format!("http://{}/debug/workers", fleet.balancer.addr("admin").unwrap());
    eventually(&format!("{count} workers"), Duration::from_secs(30), || async {
        let workers = fleet.client.get_json(&url).await?;
        let plain = workers["workers"].as_array().map_or(0, |all| all.iter().filter(|w| w["plain"] == true).count());
        Ok((plain == count).then_some(()))
    })
    .await
    .unwrap();
}

async fn chat(fleet: &Fleet, messages: Value) -> Answer {
    let body = json!({"model": "tiny-vl", "messages": messages, "max_tokens": 1}).to_string();
    let answer = fleet.client.post(&fleet.chat_url().unwrap(), body).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer
}

fn cached(answer: &Answer) -> u64 {
    answer.json().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

fn turn(name: &str, number: usize) -> Value {
    json!({"role": "user", "content": format!("{name} {number} ").repeat(60)})
}

#[tokio::test]
async fn a_conversation_stays_where_it_began() {
    for mode in [Mode::Precise, Mode::Session] {
        let (_engines, fleet) = start(3, mode, ", models: [tiny-vl], capacity_blocks: 4000, block_size: 32").await;
        for name in ["amber", "birch", "cedar"] {
            let mut messages = Vec::new();
            let mut worker = String::new();
            for number in 0..4 {
                messages.push(turn(name, number));
                let answer = chat(&fleet, Value::from(messages.clone())).await;
                let expect = if mode == Mode::Precise { "approximate" } else { "load" };
                assert_eq!(answer.header("x-fovea-mode"), expect);
                assert!(answer.header("x-fovea-overlap").starts_with("0/"), "nothing is confirmed");
                if mode == Mode::Precise && number > 0 {
                    assert_eq!(answer.header("x-fovea-worker"), worker, "{name} {number}");
                    assert!(cached(&answer) > 0, "{name} {number}");
                }
                answer.header("x-fovea-worker").clone_into(&mut worker);
            }
        }
    }
}

#[tokio::test]
async fn a_client_s_uuid_does_not_reach_the_engine() {
    let (_engines, fleet) = start(1, Mode::Precise, "").await;
    // The same 1 × 1 image under two names, then another image under the second name.
    let image = |png: &str, uuid: &str| {
        let url = format!("data:image/png;base64,{png}");
        let part = json!({"type": "image_url", "uuid": uuid, "image_url": {"url": url}});
        let text = json!({"type": "text", "text": "look at this ".repeat(60)});
        json!([{"role": "user", "content": [part, text]}])
    };
    let red = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";
    let first = chat(&fleet, image(red, "00aa")).await;
    let again = chat(&fleet, image(red, "00bb")).await;
    assert_eq!(cached(&first), 0);
    assert!(cached(&again) > 0, "another uuid made another image of it");
}

#[tokio::test]
async fn an_engine_that_is_down_gets_no_request_and_comes_back() {
    let (mut engines, fleet) = start(2, Mode::Precise, ", mode: load").await;
    let listed = fleet.client.get_json(&format!("{}/v1/models", fleet.url().unwrap())).await.unwrap();
    assert_eq!(listed["data"][0]["id"], "tiny-vl");
    let gone = engines.engines.pop().unwrap();
    let port: u16 = gone.addr("http").unwrap().rsplit(':').next().unwrap().parse().unwrap();
    gone.kill().await.unwrap();
    up(&fleet, 1).await;
    for number in 0..6 {
        assert_eq!(chat(&fleet, json!([turn("dune", number)])).await.header("x-fovea-mode"), "load");
    }
    let back = engines.start_engine(9, port).await.unwrap();
    engines.engines.push(back);
    up(&fleet, 2).await;
    let metrics = fleet.balancer_metrics().await.unwrap();
    assert!(metrics.contains(r#"balancer_plain_probes_total{end="unreachable"}"#));
    let lone = engines.engines.drain(..).collect::<Vec<_>>();
    for engine in lone {
        engine.kill().await.unwrap();
    }
    up(&fleet, 0).await;
    assert_eq!(fleet.client.get(&format!("{}/ready", fleet.url().unwrap())).await.unwrap().status, 503);
}
