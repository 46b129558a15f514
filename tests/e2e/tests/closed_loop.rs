//! The sidecar compares every prediction with what the engine then does, learns what only the engine knows, and says when they part.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use e2e::workload::{Shape, chat, image_part, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, eventually, tiny_model};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

/// A question about a picture; `text` sets it apart from others.
fn ask(image: u64, text: u64) -> Bytes {
    let parts = [text_part(&words(text, 30)), image_part(&picture(image, 448, 320)), text_part(&words(text + 7, 60))];
    chat("u", &[json!({"role": "user", "content": parts})], 2)
}

fn overlap(header: &str) -> u64 {
    header.split_once('/').and_then(|(held, _)| held.parse().ok()).unwrap_or_else(|| panic!("overlap {header:?}"))
}

#[tokio::test]
async fn right_predictions_are_found_right() {
    let fleet = Fleet::start(FleetConfig::tiny(2, Mode::Precise)).await.unwrap();
    let mut sent = 0;
    for user in 0..3 {
        for request in Shape::SHORT.user(user) {
            let answer = fleet.client.stream(&fleet.chat_url().unwrap(), request.body).await.unwrap();
            assert_eq!(answer.status, 200, "{}", answer.text);
            sent += 1;
        }
    }
    assert_eq!(fleet.judged(sent).await.unwrap(), BTreeMap::from([("exact".to_owned(), sent)]));
}

#[tokio::test]
async fn a_wrong_image_rule_is_noticed_decoded_and_no_longer_used() {
    // The engine runs with the committed model; the balancer is given one whose images are scaled otherwise.
    let wrong = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(tiny_model()).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), wrong.path().join(file.file_name())).unwrap();
    }
    let path = wrong.path().join("preprocessor_config.json");
    let mut rule: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    rule["size"]["longest_edge"] = json!(40_000);
    std::fs::write(&path, rule.to_string()).unwrap();
    let mut fleet = Fleet::without_workers(FleetConfig {
        model_dir: wrong.path().to_owned(),
        ..FleetConfig::tiny(1, Mode::Precise)
    })
    .await
    .unwrap();
    let engine = fleet.start_engine_of(&tiny_model(), 0, 0).await.unwrap();
    fleet.attach(&[format!("http://{}", engine.addr("http").unwrap())]).await.unwrap();
    for turn in 0..6 {
        let answer = fleet.client.stream(&fleet.chat_url().unwrap(), ask(turn, 100 * turn)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
        fleet.judged(turn + 1).await.unwrap();
    }
    let found = fleet.judged(6).await.unwrap();
    let diverged: u64 = found.iter().filter(|(verdict, _)| verdict.starts_with("diverged")).map(|(_, n)| n).sum();
    assert!(diverged >= 5, "{found:?}");
    let url = format!("http://{}/debug/divergences", fleet.sidecars[0].addr("admin").unwrap());
    let told = fleet.client.get_json(&url).await.unwrap();
    assert_eq!(told["ranks"][0]["media_trusted"], false);
    let first = &told["ranks"][0]["divergences"][0];
    assert!(!first["expected"].as_array().unwrap().is_empty(), "{first}");
    assert_ne!(first["expected"], first["actual"], "{first}");
    eventually("media are not predicted any more", SOON, || async {
        let answer = fleet.client.stream(&fleet.chat_url().unwrap(), ask(99, 9900)).await?;
        Ok(answer.header("x-fovea-view").starts_with("prefix;reason=media_not_trusted").then_some(()))
    })
    .await
    .unwrap();
}

/// Pages of one token are published sixteen as one block, and pads are learnt from them all the same.
#[tokio::test]
async fn sglang_s_pads_are_learnt_from_pages_of_one_token() {
    let mut config = FleetConfig::tiny(2, Mode::Precise);
    let engine = ["--speed", "0", "--engine-kind", "sglang", "--page-size", "1", "--blocks", "8000"];
    config.engine_args = engine.map(str::to_owned).to_vec();
    let fleet = Fleet::start(config).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let first = fleet.client.stream(&url, ask(1, 1)).await.unwrap();
    assert_eq!(first.status, 200, "{}", first.text);
    assert_eq!(first.header("x-fovea-view"), "prefix;reason=media_not_learnt");
    eventually("the picture is learnt", SOON, || async {
        let answer = fleet.client.stream(&url, ask(1, 1)).await?;
        Ok(answer.header("x-fovea-view").starts_with("exact").then_some(()))
    })
    .await
    .unwrap();
    fleet.quiet().await.unwrap();
    let whole = fleet.client.stream(&url, ask(1, 1)).await.unwrap();
    let ((prompt, cached), held) = (whole.tokens(), overlap(whole.header("x-fovea-overlap")));
    // All but the last token is cached; of it we know whole blocks.
    assert_eq!((cached, held), (prompt - 1, prompt / 16));
    assert_eq!(whole.header("x-fovea-worker"), first.header("x-fovea-worker"));
    let other = fleet.client.stream(&url, ask(1, 5000)).await.unwrap();
    assert!(other.header("x-fovea-view").starts_with("exact"), "{}", other.header("x-fovea-view"));
    eventually("two exact verdicts", SOON, || async {
        let found = fleet.verdicts().await?;
        assert!(found.keys().all(|verdict| !verdict.starts_with("diverged")), "{found:?}");
        Ok(found.get("exact").is_some_and(|n| *n >= 2).then_some(()))
    })
    .await
    .unwrap();
}
