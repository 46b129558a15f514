//! Images by URL: identified by their bytes, fetched where the policy allows and nowhere else.

use e2e::client::Streamed;
use e2e::origin::Origin;
use e2e::workload::{chat, data_url, image_part, noise_png, text_part};
use e2e::{Fleet, FleetConfig, Mode};
use serde_json::json;

/// Two workers behind a balancer that may fetch from loopback.
async fn fleet(inline: bool) -> Fleet {
    let media = format!("media: {{allow: [127.0.0.1/32], ports: [], inline: {inline}}}\n");
    Fleet::start(FleetConfig { balancer_extra: media, ..FleetConfig::tiny(2, Mode::Precise) }).await.expect("a fleet")
}

async fn ask(fleet: &Fleet, url: &str) -> Streamed {
    let message = json!({"role": "user", "content": [image_part(url), text_part("What is it?")]});
    let answer =
        fleet.client.stream(&fleet.chat_url().expect("a URL"), chat("u", &[message], 1)).await.expect("an answer");
    fleet.settled().await.expect("a fleet at rest");
    answer
}

#[tokio::test]
async fn equal_bytes_are_one_image_wherever_they_come_from() {
    for inline in [true, false] {
        let (fleet, origin) = (fleet(inline).await, Origin::start().await.unwrap());
        let png = noise_png(7, 448, 320);
        origin.put("/a.png", png.clone());
        let first = ask(&fleet, &origin.url("/a.png?signature=1")).await;
        assert_eq!((first.status.as_u16(), first.header("x-fovea-view")), (200, "exact"), "{}", first.text);
        for url in [origin.url("/a.png?signature=2"), data_url("image/png", &png), origin.url("/a.png?signature=1")] {
            let again = ask(&fleet, &url).await;
            let (prompt, cached) = again.tokens();
            assert_eq!(cached, (prompt - 1) / 32 * 32, "inline {inline}, {}", url.get(..40).unwrap_or(&url));
            assert_eq!(again.header("x-fovea-worker"), first.header("x-fovea-worker"));
            assert_eq!(again.header("x-fovea-overlap").split('/').next(), Some((prompt / 32).to_string().as_str()));
        }
    }
}

#[tokio::test]
async fn changed_content_under_one_url_never_hits_the_old() {
    let (fleet, origin) = (fleet(true).await, Origin::start().await.unwrap());
    origin.put("/a.png", noise_png(1, 448, 320));
    ask(&fleet, &origin.url("/a.png")).await;
    origin.put("/a.png", noise_png(2, 448, 320));
    let changed = ask(&fleet, &origin.url("/a.png")).await;
    assert_eq!(changed.tokens().1, 0);
    assert!(changed.header("x-fovea-overlap").starts_with("0/"));
}

#[tokio::test]
async fn what_cannot_or_must_not_be_fetched_is_named() {
    let open = fleet(true).await;
    let shut = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let origin = Origin::start().await.unwrap();
    let missing = origin.url("/missing.png");
    for (fleet, url, word) in [
        (&open, missing.as_str(), "status"),
        (&open, "ftp://127.0.0.1/a.png", "scheme"),
        (&shut, missing.as_str(), "port"),
        (&shut, "http://127.0.0.1/a.png", "address"),
        (&shut, "http://169.254.169.254/latest/meta-data", "address"),
        (&shut, "http://[::ffff:10.0.0.1]/a.png", "address"),
    ] {
        let message = json!({"role": "user", "content": [text_part("Look:"), image_part(url)]});
        let answer = fleet.client.post(&fleet.chat_url().unwrap(), chat("u", &[message], 1)).await.unwrap();
        let error = answer.json().unwrap()["error"].clone();
        assert_eq!((answer.status.as_u16(), &error["code"]), (400, &json!("media")), "{url}: {error}");
        let text = error["message"].as_str().unwrap();
        assert!(text.contains("media part 0") && text.contains(word), "{url}: {text}");
    }
}
