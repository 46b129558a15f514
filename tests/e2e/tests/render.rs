//! A model of a family without a rule: the engine's own renderer tells what its images become, once per size, and predictions are exact
//! from then on.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::path::Path;
use std::time::Duration;

use e2e::client::Streamed;
use e2e::workload::{chat, image_part, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, eventually, tiny_model};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
const RENDER: &str = "/v1/chat/completions/render";
const UNKNOWN: &str = "prefix;reason=images of an unknown model family";

/// The tiny model under a name that no rule knows.
fn unknown_family(dir: &Path) {
    for file in std::fs::read_dir(tiny_model()).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), dir.join(file.file_name())).unwrap();
    }
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["model_type"] = json!("nobody_knows_vl");
    std::fs::write(&path, config.to_string()).unwrap();
}

/// Two engines that answer 403 on the `closed` pages; sidecars trust the balancer by its key alone.
async fn fleet(dir: &Path, closed: &[&str], render: &str) -> Fleet {
    unknown_family(dir);
    let tiny = FleetConfig::tiny(2, Mode::Precise);
    let closed = closed.iter().flat_map(|path| ["--closed-path".to_owned(), (*path).to_owned()]);
    let engine_args = tiny.engine_args.iter().cloned().chain(closed).collect();
    let balancer_extra = format!("trust: {{shared_key: secret}}\n{render}");
    let config = FleetConfig {
        model_dir: dir.to_owned(),
        engine_args,
        balancer_extra,
        trust: "trust: {shared_key: secret}",
        ..tiny
    };
    Fleet::start(config).await.unwrap()
}

async fn ask(fleet: &Fleet, images: &[(u64, u32, u32)], text: u64) -> Streamed {
    let mut parts = vec![text_part(&words(text, 30))];
    parts.extend(images.iter().map(|&(seed, width, height)| image_part(&picture(seed, width, height))));
    parts.push(text_part(&words(text + 7, 40)));
    let body = chat("u", &[json!({"role": "user", "content": parts})], 1);
    let answer = fleet.client.stream(&fleet.chat_url().unwrap(), body).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text);
    fleet.settled().await.unwrap();
    answer
}

/// Asks about new pictures until such a size is predicted; never the same picture, so nothing is learnt by its identity.
async fn shown(fleet: &Fleet, first: u64, width: u32, height: u32) {
    let mut seed = first;
    loop {
        let answer = ask(fleet, &[(seed, width, height)], seed).await;
        let view = answer.header("x-fovea-view");
        if view == "exact;by=renderer" {
            return;
        }
        assert_eq!(view, UNKNOWN);
        seed += 1;
        assert!(seed < first + 100, "not shown");
    }
}

/// The engine reused what the balancer said it holds, and that is all of the prompt.
#[track_caller]
fn all_reused(answer: &Streamed, what: &str) {
    assert_eq!(answer.header("x-fovea-view"), "exact;by=renderer", "{what}");
    let (prompt, cached) = answer.tokens();
    assert_eq!(cached, (prompt - 1) / 32 * 32, "{what}");
    let held = (prompt / 32).to_string();
    assert_eq!(answer.header("x-fovea-overlap").split('/').next(), Some(held.as_str()), "{what}");
}

/// Predictions by verdict, of all sidecars.
async fn verdicts(fleet: &Fleet) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for sidecar in &fleet.sidecars {
        let answer = fleet.client.get(&format!("http://{}/metrics", sidecar.addr("admin").unwrap())).await.unwrap();
        let page = String::from_utf8_lossy(&answer.body).into_owned();
        found.extend(page.lines().filter_map(|line| {
            let (labels, count) = line.strip_prefix("sidecar_predictions_total{")?.split_once("} ")?;
            let verdict = labels.split_once("verdict=\"")?.1.trim_end_matches('"');
            Some((verdict.to_owned(), count.parse().ok()?))
        }));
    }
    found
}

/// Sum of the asks that ended so.
async fn asks(fleet: &Fleet, end: &str) -> u64 {
    let page = fleet.balancer_metrics().await.unwrap();
    let name = format!("balancer_render_asks_total{{end=\"{end}\"}} ");
    page.lines().find_map(|line| line.strip_prefix(name.as_str())?.parse().ok()).unwrap_or(0)
}

async fn learns_and_predicts(closed: &[&str], closed_asks: u64) {
    let dir = tempfile::tempdir().unwrap();
    let fleet = fleet(dir.path(), closed, "").await;
    let first = ask(&fleet, &[(1, 448, 320)], 1).await;
    assert_eq!(first.header("x-fovea-view"), UNKNOWN);
    shown(&fleet, 100, 448, 320).await;
    // A picture that nobody has seen, then again; two of them; and two sizes.
    let fresh = ask(&fleet, &[(900, 448, 320)], 900).await;
    assert_eq!(fresh.header("x-fovea-view"), "exact;by=renderer");
    all_reused(&ask(&fleet, &[(900, 448, 320)], 900).await, "one picture");
    shown(&fleet, 300, 97, 211).await;
    let several = [(901, 448, 320), (902, 97, 211), (903, 448, 320)];
    ask(&fleet, &several, 901).await;
    all_reused(&ask(&fleet, &several, 901).await, "three pictures");
    let mut counts = Vec::new();
    for end in ["learnt", "repeats", "closed"] {
        counts.push(asks(&fleet, end).await);
    }
    assert_eq!(counts, [2, 1, closed_asks]);
    eventually("exact verdicts", SOON, || async {
        let found = verdicts(&fleet).await;
        assert!(found.iter().all(|(verdict, n)| !verdict.starts_with("diverged") || *n == 0), "{found:?}");
        Ok((found.iter().filter(|(verdict, _)| verdict == "exact").map(|(_, n)| n).sum::<u64>() >= 5).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_size_is_asked_once_and_predicted_from_then_on() {
    learns_and_predicts(&[], 0).await;
}

#[tokio::test]
async fn where_the_renderer_is_closed_the_tokenizer_tells() {
    learns_and_predicts(&[RENDER], 1).await;
}

#[tokio::test]
async fn where_both_are_closed_images_end_the_view_and_nobody_is_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = fleet(dir.path(), &[RENDER, "/tokenize"], "").await;
    for seed in 0..20 {
        let size = 64 + 8 * u32::try_from(seed).unwrap();
        assert_eq!(ask(&fleet, &[(seed, size, 64)], seed).await.header("x-fovea-view"), UNKNOWN);
    }
    assert_eq!((asks(&fleet, "closed").await, asks(&fleet, "learnt").await), (2, 0));
}

#[tokio::test]
async fn a_template_that_is_not_the_engines_shows_nothing() {
    let dir = tempfile::tempdir().unwrap();
    unknown_family(dir.path());
    let path = dir.path().join("chat_template.json");
    let template = std::fs::read_to_string(&path).unwrap();
    let (front, back) = template.rsplit_once("assistant").unwrap();
    std::fs::write(&path, format!("{front}helper{back}")).unwrap();
    let tiny = FleetConfig::tiny(1, Mode::Precise);
    let mut fleet = Fleet::without_workers(FleetConfig { model_dir: dir.path().to_owned(), ..tiny }).await.unwrap();
    let engine = fleet.start_engine_of(&tiny_model(), 0, 0).await.unwrap();
    fleet.attach(&[format!("http://{}", engine.addr("http").unwrap())]).await.unwrap();
    let url = fleet.chat_url().unwrap();
    eventually("a probe that disagrees", SOON, || async {
        let parts = [image_part(&picture(1, 448, 320))];
        let body = chat("u", &[json!({"role": "user", "content": parts})], 1);
        let answer = fleet.client.stream(&url, body).await?;
        anyhow::ensure!(!answer.header("x-fovea-view").contains("renderer"));
        Ok((asks(&fleet, "disagrees").await == 1).then_some(()))
    })
    .await
    .unwrap();
    for seed in 0..5 {
        let parts = [image_part(&picture(seed, 64 + 8 * u32::try_from(seed).unwrap(), 64))];
        let body = chat("u", &[json!({"role": "user", "content": parts})], 1);
        let answer = fleet.client.stream(&url, body).await.unwrap();
        assert!(!answer.header("x-fovea-view").contains("renderer"), "{}", answer.header("x-fovea-view"));
    }
    assert_eq!((asks(&fleet, "disagrees").await, asks(&fleet, "learnt").await), (1, 0));
}

#[tokio::test]
async fn the_budget_is_kept_and_what_is_off_asks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let few = fleet(dir.path(), &[], "render: {per_minute: 3}\n").await;
    shown(&few, 0, 448, 320).await;
    // One for the size and one for a pair; one is left.
    let mut seed = 0;
    while asks(&few, "learnt").await < 2 {
        ask(&few, &[(seed, 64 + 8 * u32::try_from(seed).unwrap(), 64)], seed).await;
        seed += 1;
        assert!(seed < 100, "the third is not sent");
    }
    for seed in 200..230 {
        ask(&few, &[(seed, 64 + 8 * u32::try_from(seed).unwrap(), 64)], seed).await;
    }
    assert_eq!((asks(&few, "learnt").await, asks(&few, "repeats").await), (2, 1));
    let dir = tempfile::tempdir().unwrap();
    let off = fleet(dir.path(), &[], "render: {enabled: false}\n").await;
    for seed in 0..5 {
        assert_eq!(ask(&off, &[(seed, 448, 320)], seed).await.header("x-fovea-view"), UNKNOWN);
    }
    assert_eq!(asks(&off, "learnt").await, 0);
}

#[tokio::test]
async fn clients_do_not_reach_the_renderer() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = fleet(dir.path(), &[], "render: {enabled: false}\n").await;
    let body = json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "a"}]}).to_string();
    let front = fleet.client.post(&format!("{}{RENDER}", fleet.url().unwrap()), body.clone()).await.unwrap();
    assert_eq!(front.status, 404);
    let sidecar = format!("http://{}{RENDER}", fleet.sidecars[0].addr("http").unwrap());
    assert_eq!(fleet.client.post(&sidecar, body.clone()).await.unwrap().status, 403);
    let keyed = [("x-fovea-key", "secret")];
    let trusted = fleet.client.send(http::Method::POST, &sidecar, &keyed, body.into()).await.unwrap();
    assert_eq!(trusted.status, 200, "{:?}", trusted.body);
    assert!(!trusted.json().unwrap()["token_ids"].as_array().unwrap().is_empty());
}
