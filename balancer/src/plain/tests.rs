use std::sync::atomic::{AtomicBool, Ordering};

use fovea_balancer_core::choose;
use fovea_balancer_core::fleet::Freshness;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::workers::Ask;

/// An engine that says 200 or 503 to every question.
async fn engine(well: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let well = Arc::clone(&well);
            tokio::spawn(async move {
                let mut bytes = [0; 1024];
                while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {
                    let status = if well.load(Ordering::SeqCst) { "200 OK" } else { "503 Service Unavailable" };
                    let body = r#"{"data":[{"id":"m"}]}"#;
                    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    url
}

fn config(url: &str) -> PlainConfig {
    serde_json::from_value(serde_json::json!({"url": url, "capacity_blocks": 100})).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_is_in_the_fleet_while_it_is_well() {
    let well = Arc::new(AtomicBool::new(true));
    let url = engine(Arc::clone(&well)).await;
    let workers = Arc::new(Workers::new(Freshness::default(), choose::Settings::default(), 1000));
    let stop = CancellationToken::new();
    let task = tokio::spawn(follow(config(&url), None, Arc::clone(&workers), PlainMetrics::default(), stop.clone()));
    let wait = async |ready: bool| {
        let reached = async {
            while workers.any_ready(Instant::now()) != ready {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached).await.expect("the state is reached in time");
    };
    wait(true).await;
    let pool = workers.pools().remove(0);
    let ask = Ask { model: "m", prompt_tokens: 100, ..Ask::default() };
    let route = workers.route(&pool, &ask, None, Instant::now()).unwrap();
    assert!(route.plain && route.url == url.as_str().into());
    well.store(false, Ordering::SeqCst);
    wait(false).await;
    well.store(true, Ordering::SeqCst);
    wait(true).await;
    stop.cancel();
    task.await.unwrap();
    assert!(!workers.any_ready(Instant::now()));
}

#[test]
fn what_a_client_must_not_set_is_cut() {
    let record = Preamble { cuts: vec![(2, 3), (7, 1)], ..Preamble::default() };
    let cut = |bytes: &'static [u8]| body(&record, &Bytes::from_static(bytes));
    assert_eq!(cut(b"0123456789").as_deref(), Some(b"015689".as_slice()));
    // Cuts of another body: nothing is sent rather than a uuid.
    assert_eq!(cut(b"0123"), None);
}
