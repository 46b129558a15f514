//! A balancer without model files gets them from a worker, and nobody else does.

use std::time::Duration;

use bytes::Bytes;
use e2e::workload::four_pictures;
use e2e::{Fleet, FleetConfig, Mode, eventually};
use http::Method;

/// Longest wait for the files to be pulled and loaded.
const PULL_MAX: Duration = Duration::from_secs(30);

/// Two workers that give the model to those who know the key.
fn config() -> FleetConfig {
    let tiny = FleetConfig::tiny(2, Mode::Precise);
    FleetConfig {
        balancer_has_model: false,
        balancer_extra: "trust: {shared_key: secret}\n".into(),
        trust: "trust: {shared_key: secret}",
        sidecar_extra: format!("model: {{dir: {}}}\n", tiny.model_dir.display()),
        ..tiny
    }
}

#[tokio::test]
async fn a_balancer_without_model_files_pulls_them_and_predicts_exactly() {
    let fleet = Fleet::start(config()).await.unwrap();
    let url = fleet.chat_url().unwrap();
    eventually("an exact view", PULL_MAX, || async {
        let answer = fleet.client.stream(&url, four_pictures(0)).await?;
        anyhow::ensure!(answer.status == 200, "{}", answer.text);
        let view = answer.header("x-fovea-view");
        anyhow::ensure!(["exact", "none;reason=no_model_dir"].contains(&view), "{view}");
        Ok((view == "exact").then_some(()))
    })
    .await
    .unwrap();
    let first = fleet.client.stream(&url, four_pictures(10)).await.unwrap();
    fleet.settled().await.unwrap();
    let again = fleet.client.stream(&url, four_pictures(10)).await.unwrap();
    let (prompt, cached) = again.tokens();
    assert_eq!(cached, (prompt - 1) / 32 * 32);
    assert_eq!(again.header("x-fovea-worker"), first.header("x-fovea-worker"));
    eventually("the metrics of the pull", PULL_MAX, || async {
        let page = fleet.balancer_metrics().await?;
        let lines = [r#"balancer_model_pulls_total{end="loaded"} 1"#, "balancer_models_pulled 1"];
        Ok(lines.iter().all(|line| page.contains(line)).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn model_files_are_given_to_balancers_only_and_listed_ones_only() {
    let fleet = Fleet::start(config()).await.unwrap();
    let sidecar = format!("http://{}/fovea/v1/model/", fleet.sidecars[0].addr("http").unwrap());
    let key = &[("x-fovea-key", "secret")][..];
    for (headers, name, expect) in [
        (&[][..], "config.json", 403),
        (&[("x-fovea-key", "guess")][..], "config.json", 403),
        (&[][..], "chat_template.jinja", 403),
        (key, "config.json", 200),
        (key, "chat_template.jinja", 404),
        (key, "model.safetensors", 403),
        (key, "../config.json", 403),
        (key, "%2e%2e/config.json", 403),
    ] {
        let answer = fleet.client.send(Method::GET, &format!("{sidecar}{name}"), headers, Bytes::new()).await.unwrap();
        assert_eq!(answer.status.as_u16(), expect, "{name} {headers:?}");
    }
    let from_client = format!("{}/fovea/v1/model/config.json", fleet.url().unwrap());
    assert_eq!(fleet.client.get(&from_client).await.unwrap().status.as_u16(), 404);
}
