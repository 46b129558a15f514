//! What is said of models that are there, promised, or unknown; and of pools that are not routed by what their engines hold.

use std::time::Duration;

use bytes::Bytes;
use e2e::{Fleet, FleetConfig, Mode, eventually};
use http::Method;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

fn ask(model: &str, content: &str) -> String {
    json!({"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}).to_string()
}

/// One worker of `tiny-vl`; `declared-only` has none.
fn config(rest: &str) -> FleetConfig {
    let extra = format!("  - {{name: declared-only}}\n  - {{name: not-promised, declared: false}}\n{rest}\n");
    FleetConfig { balancer_extra: extra, ..FleetConfig::tiny(1, Mode::Precise) }
}

async fn status(fleet: &Fleet, path: &str) -> (u16, Value) {
    let url = format!("{}{path}", fleet.url().expect("the fleet is up"));
    let answer = fleet.client.send(Method::GET, &url, &[], Bytes::new()).await.expect("an answer");
    (answer.status.as_u16(), answer.json().expect("JSON"))
}

#[tokio::test]
async fn a_promised_model_is_out_of_service_and_an_unknown_one_unknown() {
    let fleet = Fleet::start(config("")).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let promised = fleet.client.post(&url, ask("declared-only", "hi")).await.unwrap();
    let error = promised.json().unwrap()["error"].clone();
    assert_eq!((promised.status.as_u16(), &error["code"]), (503, &json!("no_worker")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("declared-only"), "{error}");
    let after: u64 = promised.header("retry-after").parse().unwrap();
    assert!((1..=5).contains(&after));
    for unknown in ["not-promised", "nobody-s", &"x".repeat(100_000)] {
        let answer = fleet.client.post(&url, ask(unknown, "hi")).await.unwrap();
        let code = answer.json().unwrap()["error"]["code"].clone();
        assert_eq!((answer.status.as_u16(), code), (404, json!("model_not_found")));
        assert!(answer.body.len() < 1000 && answer.header("retry-after").is_empty());
    }
    let page = fleet.balancer_metrics().await.unwrap();
    for line in
        [r#"fovea_demand_refused_total{model="declared-only"} 1"#, r#"fovea_demand_refused_total{model="other"} 3"#]
    {
        assert!(page.contains(line), "{line} not in\n{page}");
    }
}

#[tokio::test]
async fn the_list_of_models_has_what_answers_and_no_more() {
    let mut config = config("");
    config.engine_args.extend(["--lora", "adapter=./tiny-qwen3-vl-lora"].map(str::to_owned));
    let mut fleet = Fleet::start(config).await.unwrap();
    let names = |list: &Value| {
        let ids = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    let (_, list) = status(&fleet, "/v1/models").await;
    assert_eq!(names(&list), ["adapter", "tiny-vl"]);
    let (found, adapter) = status(&fleet, "/v1/models/adapter").await;
    assert_eq!((found, &adapter["parent"], &adapter), (200, &json!("tiny-vl"), &list["data"][0]));
    for (name, expect) in [("tiny-vl", 200), ("tiny%2Dvl", 200), ("declared-only", 503), ("not-promised", 404)] {
        assert_eq!(status(&fleet, &format!("/v1/models/{name}")).await.0, expect, "{name}");
    }
    // Without its worker a declared model leaves the list, and is out of service.
    fleet.sidecars.pop().unwrap().kill().await.unwrap();
    eventually("the worker is gone", SOON, || async {
        let (_, list) = status(&fleet, "/v1/models").await;
        Ok(names(&list).is_empty().then_some(()))
    })
    .await
    .unwrap();
    let url = fleet.chat_url().unwrap();
    for (name, expect) in [("tiny-vl", 503), ("adapter", 404)] {
        assert_eq!(fleet.client.post(&url, ask(name, "hi")).await.unwrap().status, expect, "{name}");
    }
}

#[tokio::test]
async fn readiness_follows_its_policy() {
    let any = Fleet::start(config("")).await.unwrap();
    assert_eq!(status(&any, "/ready").await.0, 200);
    let all = Fleet::start(config("ready_when: all_declared")).await.unwrap();
    let (refused, why) = status(&all, "/ready").await;
    assert_eq!(refused, 503);
    assert!(why["error"]["message"].as_str().unwrap().contains("declared-only"), "{why}");
    let admin = format!("http://{}/readyz", all.balancer.addr("admin").unwrap());
    assert_eq!(all.client.get(&admin).await.unwrap().status, 503);
    // What is there is served all the same.
    let url = all.chat_url().unwrap();
    assert_eq!(all.client.post(&url, ask("tiny-vl", "hi")).await.unwrap().status, 200);
    let met =
        FleetConfig { balancer_extra: "ready_when: all_declared\n".into(), ..FleetConfig::tiny(1, Mode::Precise) };
    let met = Fleet::start(met).await.unwrap();
    assert_eq!(status(&met, "/ready").await.0, 200);
}

/// What the admin page and the metrics say of the one pool.
async fn finding(fleet: &Fleet) -> (Value, String) {
    let url = format!("http://{}/debug/workers", fleet.balancer.addr("admin").expect("the fleet is up"));
    let page = fleet.client.get_json(&url).await.expect("an answer");
    (page["pools"][0]["diagnosis"].clone(), fleet.balancer_metrics().await.expect("an answer"))
}

async fn found(fleet: &Fleet, expect: &str) {
    let line = format!("balancer_pool_findings{{finding=\"{expect}\"}} 1");
    eventually(&line, SOON, || async {
        let (told, page) = finding(fleet).await;
        Ok((told["finding"] == expect && page.contains(&line)).then_some(()))
    })
    .await
    .expect("found in time");
    let log = tokio::fs::read_to_string(fleet.dir().join("balancer.log")).await.expect("a log");
    assert_eq!(log.matches("not routed by its cache").count(), 1, "{log}");
}

#[tokio::test]
async fn a_pool_without_tokenizer_is_found() {
    // The balancer has no files of the model, and its sidecar has none to give.
    let sidecar_extra = "model: {dir: /nowhere}\n".to_owned();
    let config = FleetConfig { balancer_has_model: false, sidecar_extra, ..FleetConfig::tiny(1, Mode::Precise) };
    let fleet = Fleet::start(config).await.unwrap();
    let url = fleet.chat_url().unwrap();
    for n in 0..25 {
        let body = ask("tiny-vl", &"word ".repeat(50 + n));
        assert_eq!(fleet.client.post(&url, body).await.unwrap().status, 200);
    }
    found(&fleet, "no_model_files").await;
}

#[tokio::test]
async fn prompts_that_never_match_are_found() {
    // The balancer's template is not the engine's.
    let wrong = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(e2e::tiny_model()).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), wrong.path().join(file.file_name())).unwrap();
    }
    let path = wrong.path().join("chat_template.json");
    let template: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let other = format!("another system prompt {}", template["chat_template"].as_str().unwrap());
    std::fs::write(&path, json!({"chat_template": other}).to_string()).unwrap();
    let config = FleetConfig { model_dir: wrong.path().to_owned(), ..FleetConfig::tiny(1, Mode::Precise) };
    let mut fleet = Fleet::without_workers(config).await.unwrap();
    let engine = fleet.start_engine_of(&e2e::tiny_model(), 0, 0).await.unwrap();
    fleet.attach(&[format!("http://{}", engine.addr("http").unwrap())]).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let body = ask("tiny-vl", &"word ".repeat(200));
    let first = fleet.client.post(&url, body.clone()).await.unwrap();
    assert_eq!(first.status, 200, "{:?}", first.body);
    eventually("the pool is found", SOON, || async {
        let answer = fleet.client.post(&url, body.clone()).await?;
        assert_eq!(answer.header("x-fovea-overlap").split_once('/').unwrap().0, "0");
        let (told, _) = finding(&fleet).await;
        Ok((told["finding"] == "never_matches").then_some(()))
    })
    .await
    .unwrap();
    found(&fleet, "never_matches").await;
}
