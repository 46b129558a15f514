//! Who may ask, how much, and what tenants share.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use e2e::client::Answer;
use e2e::workload::{image_part, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, eventually};
use http::Method;
use serde_json::{Value, json};

const BLOCK: u64 = 32;
const SOON: Duration = Duration::from_secs(20);

fn key(name: &str) -> String {
    format!("sk-{name}-0123456789abcdef")
}

/// Files with one key each, named like their tenant; and a secret.
fn files(names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder for the test");
    for name in names {
        std::fs::write(dir.path().join(name), key(name)).expect("a folder for the test");
    }
    std::fs::write(dir.path().join("secret"), "a secret of sixteen or more").expect("a folder for the test");
    dir
}

fn tenant(dir: &Path, name: &str, rest: &str) -> String {
    format!("  - {{name: {name}, keys_file: {}{rest}}}\n", dir.join(name).display())
}

fn config(dir: &Path, tenants: &str) -> FleetConfig {
    let secret = dir.join("secret").display().to_string();
    let access = format!("access: {{isolation_secret_file: {secret}, keys_poll: 50ms}}\n");
    FleetConfig { balancer_extra: format!("tenants:\n{tenants}{access}"), ..FleetConfig::tiny(1, Mode::Precise) }
}

async fn ask(fleet: &Fleet, key: &str, body: &Value) -> Answer {
    let (url, bearer) = (fleet.chat_url().expect("the fleet is up"), format!("Bearer {key}"));
    let headers = [("authorization", bearer.as_str())];
    fleet.client.send(Method::POST, &url, &headers, Bytes::from(body.to_string())).await.expect("an answer")
}

fn question(seed: u64, length: usize) -> Value {
    json!({"model": "tiny-vl", "max_tokens": 1, "messages": [{"role": "user", "content": words(seed, length)}]})
}

fn with_image() -> Value {
    let content = [text_part(&words(1, 60)), image_part(&picture(1, 448, 320)), text_part(&words(2, 60))];
    json!({"model": "tiny-vl", "max_tokens": 1, "messages": [{"role": "user", "content": content}]})
}

/// (prompt tokens, cached tokens, confirmed blocks)
fn seen(answer: &Answer) -> (u64, u64, u64) {
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let usage = answer.json().expect("JSON")["usage"].clone();
    let held = answer.header("x-fovea-overlap").split_once('/').expect("a number").0.parse().expect("a number");
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (usage["prompt_tokens"].as_u64().expect("a number"), cached, held)
}

#[tokio::test]
async fn isolated_tenants_share_nothing_and_others_everything() {
    let dir = files(&["a", "b", "open1", "open2"]);
    let row = |name: &str, rest: &str| tenant(dir.path(), name, rest);
    let tenants = row("a", ", isolate: true") + &row("b", ", isolate: true") + &row("open1", "") + &row("open2", "");
    let fleet = Fleet::start(config(dir.path(), &tenants)).await.unwrap();
    let mut salted = with_image();
    salted["cache_salt"] = json!("x");
    let rows: [(&str, &Value, bool); 10] = [
        ("a", &with_image(), false),
        ("b", &with_image(), false),
        ("a", &with_image(), true),
        ("b", &with_image(), true),
        ("open1", &with_image(), false),
        ("open2", &with_image(), true),
        ("a", &salted, false),
        ("a", &salted, true),
        ("b", &salted, false),
        ("open2", &salted, false),
    ];
    for (at, (name, body, shared)) in rows.into_iter().enumerate() {
        let answer = ask(&fleet, &key(name), body).await;
        let (prompt, cached, held) = seen(&answer);
        assert_eq!(answer.header("x-fovea-view"), "exact", "request {at}");
        let blocks = if shared { prompt / BLOCK } else { 0 };
        assert_eq!((held, cached), (blocks, blocks.min((prompt - 1) / BLOCK) * BLOCK), "request {at} of {name}");
        fleet.settled().await.unwrap();
    }
    assert_eq!(fleet.judged(10).await.unwrap(), BTreeMap::from([("exact".to_owned(), 10)]));
}

#[tokio::test]
async fn isolated_tenants_share_nothing_on_sglang() {
    let dir = files(&["a", "b"]);
    let tenants = tenant(dir.path(), "a", ", isolate: true") + &tenant(dir.path(), "b", ", isolate: true");
    let mut config = config(dir.path(), &tenants);
    let engine = ["--speed", "0", "--engine-kind", "sglang", "--page-size", "16", "--blocks", "8000"];
    config.engine_args = engine.map(str::to_owned).to_vec();
    let fleet = Fleet::start(config).await.unwrap();
    for (name, shared) in [("a", false), ("b", false), ("a", true), ("b", true)] {
        let answer = ask(&fleet, &key(name), &question(1, 100)).await;
        let (prompt, _, held) = seen(&answer);
        assert_eq!((answer.header("x-fovea-view"), held), ("exact", if shared { prompt / 16 } else { 0 }), "{name}");
        fleet.settled().await.unwrap();
    }
    assert_eq!(fleet.judged(4).await.unwrap(), BTreeMap::from([("exact".to_owned(), 4)]));
}

#[tokio::test]
async fn only_who_has_a_key_may_ask_and_new_keys_need_no_restart() {
    let dir = files(&["a"]);
    let fleet = Fleet::start(config(dir.path(), &tenant(dir.path(), "a", ""))).await.unwrap();
    let refused = ask(&fleet, "sk-nobody-0123456789", &question(1, 5)).await;
    let error = refused.json().unwrap()["error"].clone();
    assert_eq!((refused.status.as_u16(), &error["code"]), (401, &json!("invalid_api_key")), "{error}");
    assert_eq!((&error["type"], refused.header("www-authenticate")), (&json!("invalid_request_error"), "Bearer"));
    let url = fleet.url().unwrap();
    let get = |path: &'static str, key: String| {
        let (client, url) = (fleet.client.clone(), format!("{url}{path}"));
        async move { client.send(Method::GET, &url, &[("x-api-key", &key)], Bytes::new()).await.unwrap().status }
    };
    let statuses = (get("/v1/models", key("a")).await, get("/v1/models", String::new()).await);
    assert_eq!((statuses.0.as_u16(), statuses.1.as_u16()), (200, 401));
    let open = (get("/health", String::new()).await, get("/ready", String::new()).await);
    assert_eq!((open.0.as_u16(), open.1.as_u16()), (200, 200));
    assert_eq!(ask(&fleet, &key("a"), &question(1, 5)).await.status, 200);

    tokio::fs::write(dir.path().join("a"), key("new")).await.unwrap();
    eventually("the new key is known", SOON, || async {
        Ok((ask(&fleet, &key("new"), &question(1, 5)).await.status == 200).then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(ask(&fleet, &key("a"), &question(1, 5)).await.status, 401);
    let log = tokio::fs::read_to_string(fleet.dir().join("balancer.log")).await.unwrap();
    assert!(!log.contains("0123456789"), "a key is in the log");
}

#[tokio::test]
async fn limits_are_kept_and_told() {
    let dir = files(&["rate", "tokens", "many", "small"]);
    let row = |name: &str, rest: &str| tenant(dir.path(), name, rest);
    let tenants = row("rate", ", limits: {requests_per_minute: 1, requests_burst: 2}")
        + &row("tokens", ", per_key: {prompt_tokens_per_minute: 60, prompt_tokens_burst: 250}")
        + &row("many", ", limits: {concurrent: 1}")
        + &row("small", ", media_max: 0, body_max: 1MiB");
    let fleet = Fleet::start(config(dir.path(), &tenants)).await.unwrap();

    let answers = [ask(&fleet, &key("rate"), &question(1, 5)).await, ask(&fleet, &key("rate"), &question(1, 5)).await];
    let told = answers.each_ref().map(|answer| {
        let header = |name: &str| answer.header(name).to_owned();
        (answer.status.as_u16(), header("x-ratelimit-limit-requests"), header("x-ratelimit-remaining-requests"))
    });
    let expect = ["1", "0"].map(|left| (200, "1".to_owned(), left.to_owned()));
    assert_eq!(told, expect);
    let third = ask(&fleet, &key("rate"), &question(1, 5)).await;
    let after: u64 = third.header("retry-after").parse().unwrap();
    assert!(third.status == 429 && (1..=61).contains(&after), "{} {after}", third.status);
    assert!(!third.header("x-ratelimit-reset-requests").is_empty());
    assert_eq!(third.json().unwrap()["error"]["code"], "rate_limit_exceeded");

    let (prompt, ..) = seen(&ask(&fleet, &key("tokens"), &question(2, 50)).await);
    assert!((126..250).contains(&prompt), "the rows below suppose so: {prompt}");
    let second = ask(&fleet, &key("tokens"), &question(3, 50)).await;
    assert_eq!((second.status.as_u16(), second.json().unwrap()["error"]["type"].as_str()), (429, Some("tokens")));
    assert!(!second.header("retry-after").is_empty());
    assert_eq!(second.header("x-ratelimit-limit-tokens"), "60");
    let never = ask(&fleet, &key("tokens"), &question(4, 200)).await;
    assert_eq!((never.status.as_u16(), never.header("retry-after")), (429, ""));

    let image = ask(&fleet, &key("small"), &with_image()).await;
    assert_eq!((image.status.as_u16(), &image.json().unwrap()["error"]["param"]), (400, &json!("messages")));
    assert_eq!(ask(&fleet, &key("small"), &question(1, 250_000)).await.status, 413);
    assert_eq!(ask(&fleet, &key("small"), &question(1, 5)).await.status, 200);
}

#[tokio::test]
async fn a_client_that_leaves_gives_its_place_free() {
    let dir = files(&["many"]);
    let fleet =
        Fleet::start(config(dir.path(), &tenant(dir.path(), "many", ", limits: {concurrent: 1}"))).await.unwrap();
    let engine = format!("http://{}/sim/fault", fleet.engines[0].addr("http").unwrap());
    fleet.client.post(&engine, json!({"fault": "stall"}).to_string()).await.unwrap();
    let (url, bearer, body) = (fleet.chat_url().unwrap(), format!("Bearer {}", key("many")), question(1, 50));
    let client = fleet.client.clone();
    let waiting = tokio::spawn(async move {
        let headers = [("authorization", bearer.as_str())];
        // Those that look whether the place is taken take it for a moment.
        while client.send(Method::POST, &url, &headers, Bytes::from(body.to_string())).await.unwrap().status == 429 {}
    });
    eventually("the place is taken", SOON, || async {
        let answer = ask(&fleet, &key("many"), &json!({"model": "nope", "messages": []})).await;
        Ok((answer.status == 429).then_some(()))
    })
    .await
    .unwrap();
    waiting.abort();
    eventually("the place is free", SOON, || async {
        let answer = ask(&fleet, &key("many"), &json!({"model": "nope", "messages": []})).await;
        Ok((answer.status == 404).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn what_tenants_use_is_counted_as_the_engine_counts_it() {
    let dir = files(&["a", "b"]);
    let fleet =
        Fleet::start(config(dir.path(), &(tenant(dir.path(), "a", "") + &tenant(dir.path(), "b", "")))).await.unwrap();
    let (prompt, ..) = seen(&ask(&fleet, &key("a"), &with_image()).await);
    fleet.settled().await.unwrap();
    let (_, cached, _) = seen(&ask(&fleet, &key("a"), &with_image()).await);
    let mut streamed = question(5, 40);
    streamed["stream"] = json!(true);
    streamed["max_tokens"] = json!(7);
    assert_eq!(ask(&fleet, &key("b"), &streamed).await.status, 200);
    streamed["stream_options"] = json!({"include_usage": true});
    assert_eq!(ask(&fleet, &key("b"), &streamed).await.status, 200);
    assert_eq!(ask(&fleet, &key("b"), &json!({"model": "nope", "messages": []})).await.status, 404);
    let page = fleet.balancer_metrics().await.unwrap();
    let count = |name: &str| {
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        line.unwrap_or_else(|| panic!("no {name} in\n{page}"))
    };
    let tokens = |tenant: &str, kind: &str, source: &str| {
        count(&format!("balancer_tenant_tokens_total{{tenant=\"{tenant}\",kind=\"{kind}\",source=\"{source}\"}}"))
    };
    assert_eq!((tokens("a", "prompt", "engine"), tokens("a", "cached", "engine")), (2 * prompt, cached));
    assert_eq!((tokens("a", "completion", "engine"), tokens("a", "image", "estimate")), (2, 2 * 140));
    assert_eq!(tokens("b", "prompt", "engine"), tokens("b", "prompt", "estimate"));
    assert_eq!((tokens("b", "completion", "engine"), tokens("b", "completion", "estimate")), (7, 7));
    assert_eq!(count("balancer_tenant_requests_total{tenant=\"b\"}"), 2);
    assert_eq!(count("balancer_tenant_refusals_total{tenant=\"b\",cause=\"unknown_model\"}"), 1);
}
