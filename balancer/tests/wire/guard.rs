//! The sync port with a shared key, against hand-made peers.

use super::support::{Balancer, PATIENCE, balancer, hello};
use fovea_gossip::auth::{self, Cause, Dialer, Message, SharedKey};
use fovea_gossip::codec::{Decoder, encode_sidecar};
use fovea_gossip::message::{FromBalancer, FromSidecar};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const KEYED: &str = "trust: {shared_key: secret}";

async fn message(link: &mut TcpStream) -> Message {
    let mut length = [0; 4];
    link.read_exact(&mut length).await.unwrap();
    let mut frame = vec![0; auth::frame_length(length).unwrap()];
    link.read_exact(&mut frame).await.unwrap();
    auth::decode(&frame).unwrap()
}

/// Everything until the end of the connection.
async fn rest(link: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(PATIENCE, link.read_to_end(&mut bytes)).await;
    read.expect("an end in time").unwrap();
    bytes
}

async fn ends(balancer: &Balancer, cause: &str) {
    balancer.until(|b| b.metric(&format!(r#"balancer_sync_ends_total{{cause="{cause}"}}"#)) == 1).await;
    assert_eq!(balancer.worker_count(), 0);
}

fn first_hello() -> Vec<u8> {
    encode_sidecar(&FromSidecar::Hello(hello("http://127.0.0.1:1", 32))).unwrap().to_vec()
}

#[tokio::test]
async fn a_proven_peer_says_its_hello_in_the_same_write_as_its_proof() {
    let balancer = balancer(KEYED).await;
    let mut link = TcpStream::connect(balancer.sync).await.unwrap();
    let (mut dialer, knock) = Dialer::new(SharedKey::new(b"secret"), [7; 32]);
    // Byte by byte: no message ends where a read does.
    for byte in auth::encode(&knock) {
        link.write_all(&[byte]).await.unwrap();
    }
    let proof = dialer.on(message(&mut link).await).unwrap().unwrap();
    link.write_all(&[&auth::encode(&proof)[..], &first_hello()].concat()).await.unwrap();
    assert_eq!(dialer.on(message(&mut link).await), Ok(None));
    let (mut decoder, mut bytes) = (Decoder::<FromBalancer>::new(), [0; 256]);
    let read = link.read(&mut bytes).await.unwrap();
    decoder.push(&bytes[..read]);
    assert!(matches!(decoder.next(), Ok(Some(FromBalancer::Welcome(_)))));
    balancer.until(|b| b.worker_count() == 1).await;
    assert_eq!(balancer.metric(r#"balancer_sync_opened_total{proven="key"}"#), 1);
}

#[tokio::test]
async fn a_peer_without_the_key_is_told_so_and_its_hello_is_not_looked_at() {
    let balancer = balancer(KEYED).await;
    let mut link = TcpStream::connect(balancer.sync).await.unwrap();
    // Far more than the balancer needs to refuse: the refusal must not be lost.
    link.write_all(&[first_hello(), vec![0; 40_000]].concat()).await.unwrap();
    let mut told = [0; 8];
    link.read_exact(&mut told).await.unwrap();
    assert_eq!(auth::decode(&told[4..]), Ok(Message::Refused(Cause::KeyMissing)));
    link.shutdown().await.unwrap();
    rest(&mut link).await;
    ends(&balancer, "key_missing").await;
}

#[tokio::test]
async fn a_wrong_proof_gets_no_proof_back() {
    let balancer = balancer(KEYED).await;
    let mut link = TcpStream::connect(balancer.sync).await.unwrap();
    let (mut dialer, knock) = Dialer::new(SharedKey::new(b"Secret"), [7; 32]);
    link.write_all(&auth::encode(&knock)).await.unwrap();
    let proof = dialer.on(message(&mut link).await).unwrap().unwrap();
    link.write_all(&auth::encode(&proof)).await.unwrap();
    assert_eq!(message(&mut link).await, Message::Refused(Cause::WrongKey));
    link.shutdown().await.unwrap();
    assert!(rest(&mut link).await.is_empty());
    ends(&balancer, "wrong_key").await;
}

#[tokio::test]
async fn a_peer_with_a_key_is_not_taken_where_there_is_none() {
    let balancer = balancer("").await;
    let mut link = TcpStream::connect(balancer.sync).await.unwrap();
    link.write_all(&auth::encode(&Message::Knock([7; 32]))).await.unwrap();
    assert_eq!(message(&mut link).await, Message::Refused(Cause::NoKeyHere));
    link.shutdown().await.unwrap();
    rest(&mut link).await;
    ends(&balancer, "no_key_here").await;
}

#[tokio::test]
async fn long_and_endless_exchanges_end() {
    // A frame that says it knocks, and is longer than any.
    let keyed = balancer(KEYED).await;
    let mut link = TcpStream::connect(keyed.sync).await.unwrap();
    link.write_all(&[0, 0, 16, 0, 33, 0, 0x21]).await.unwrap();
    rest(&mut link).await;
    ends(&keyed, "bad_frame").await;
    // A peer that knocks and says nothing more, and one that says nothing at all.
    for begun in [&auth::encode(&Message::Knock([7; 32]))[..], &[]] {
        let silent = balancer(KEYED).await;
        let mut link = TcpStream::connect(silent.sync).await.unwrap();
        link.write_all(begun).await.unwrap();
        rest(&mut link).await;
        ends(&silent, "handshake_timeout").await;
    }
}
