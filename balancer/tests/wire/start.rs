//! OPS-01 of docs/operate/complaints.md: peers that connect and say nothing.

use super::support::{CHAT, Script, balancer, chat, post, sidecar, talk};
use tokio::net::TcpStream;

#[tokio::test]
async fn peers_that_say_nothing_hold_up_nobody() {
    let balancer = balancer("").await;
    let mut silent = Vec::new();
    for _ in 0..7 {
        silent.push(TcpStream::connect(balancer.sync).await.expect("an open port"));
    }
    let _speaks = sidecar(&balancer, Script::Answer("ok")).await;
    let answer = talk(balancer.http, &post(CHAT, "connection: close\r\n", &chat("tiny-vl"))).await;
    assert!(answer.ends_with("\r\n\r\nok"), "{answer}");
    assert_eq!(balancer.worker_count(), 1, "those that said nothing are no workers");
}
