use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::*;

struct Served {
    address: std::net::SocketAddr,
    draining: Arc<AtomicBool>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

async fn start() -> Served {
    let mut registry = Registry::default();
    let counter = Counter::<u64>::default();
    counter.inc();
    registry.register("fovea_things", "Things", counter);
    let draining = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&draining);
    let ready = move || match flag.load(Ordering::Relaxed) {
        true => Readiness::NotReady("draining".to_owned()),
        false => Readiness::Ready,
    };
    let admin = Admin::new(Arc::new(registry), ready).route("/workers", || serde_json::json!({"workers": [1]}));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(serve(listener, admin, stop.clone()));
    Served { address, draining, stop, task }
}

async fn ask(served: &Served, request: &str) -> String {
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn check(served: &Served, method: &str, path: &str, parts: &[&str]) {
    let answer = ask(served, &format!("{method} {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
    for part in parts {
        assert!(answer.contains(part), "{part:?} is not in: {answer}");
    }
}

#[tokio::test]
async fn pages_answer_over_a_socket_and_the_stop_ends_it() {
    let served = start().await;
    check(&served, "GET", "/metrics", &["200 OK", "openmetrics-text", "fovea_things_total 1", "# EOF"]).await;
    check(&served, "GET", "/healthz", &["200 OK", "\r\n\r\nok\n"]).await;
    check(&served, "GET", "/readyz?verbose", &["200 OK", "\r\n\r\nready\n"]).await;
    check(&served, "GET", "/workers", &["200 OK", "application/json", r#"{"workers":[1]}"#]).await;
    check(&served, "GET", "/nothing", &["404 Not Found"]).await;
    check(&served, "POST", "/metrics", &["405 Method Not Allowed", "allow: GET, HEAD"]).await;
    served.draining.store(true, Ordering::Relaxed);
    check(&served, "GET", "/readyz", &["503 Service Unavailable", "\r\n\r\ndraining\n"]).await;
    served.stop.cancel();
    served.task.await.unwrap();
    assert!(TcpStream::connect(served.address).await.is_err());
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused() {
    let served = start().await;
    let request = format!("GET / HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(HEAD_BYTES_MAX - 20));
    let answer = ask(&served, &request).await;
    assert!(answer.contains(" 431 "), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_says_nothing_is_cut_off() {
    let served = start().await;
    assert_eq!(ask(&served, "GET /").await, "");
}
