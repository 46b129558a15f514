//! Complaints about request bodies (docs/operate/complaints.md): sizes, framings, and a first worker that refuses.

use super::support::{CHAT, Script, Seen, Sidecar, balancer, post, sidecar, talk};

const BUSY: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";

/// A chat request of about `bytes` bytes whose text repeats nowhere at a multiple of a buffer's size.
fn body(bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 16);
    for n in 0_u32.. {
        if text.len() >= bytes {
            break;
        }
        text.push_str(&n.wrapping_mul(2_654_435_761).to_string());
    }
    format!(r#"{{"model":"tiny-vl","messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

fn chunked(body: &str, chunk: usize) -> String {
    let mut sent =
        format!("POST {CHAT} HTTP/1.1\r\nhost: b\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    for piece in body.as_bytes().chunks(chunk) {
        let piece = std::str::from_utf8(piece).expect("ascii");
        sent.push_str(&format!("{:x}\r\n{piece}\r\n", piece.len()));
    }
    sent + "0\r\n\r\n"
}

/// How many requests a worker got since the last look. Each must be `body` behind its preamble.
#[track_caller]
fn check_received(sidecar: &mut Sidecar, body: &str) -> usize {
    let mut count = 0;
    while let Ok(seen) = sidecar.seen.try_recv() {
        let Seen::Request { head, body: received } = seen else { continue };
        let announced = head.lines().find_map(|line| line.strip_prefix("x-fovea-preamble: ")).expect("a preamble");
        let record: usize = announced.parse().expect("a length");
        assert!(received[record..] == *body.as_bytes(), "{} bytes of {}", received.len() - record, body.len());
        count += 1;
    }
    count
}

/// REQ-01, REQ-03 (30 MiB pass by default), REQ-04: requests in turn, so that many of them are refused by the first worker.
#[tokio::test]
async fn bodies_of_any_size_arrive_byte_exact_also_at_the_second_worker() {
    let balancer = balancer("mode: round_robin\nretry_percent: 100\nhealth: {failures_max: 0, slow_start: 0s}").await;
    let mut busy = sidecar(&balancer, Script::Raw(BUSY)).await;
    let mut good = sidecar(&balancer, Script::Answer("ok")).await;
    let mut refused = 0;
    for bytes in [10, 60_000, 200_000, 1 << 20, 20_000_000, 30 << 20] {
        let body = body(bytes);
        let framings = [
            post(CHAT, "connection: close\r\n", &body),
            post(CHAT, "connection: close\r\nexpect: 100-continue\r\n", &body),
            chunked(&body, 50_000),
        ];
        for sent in &framings {
            for _ in 0..2 {
                let answer = talk(balancer.http, sent).await;
                assert!(answer.ends_with("\r\n\r\nok"), "{bytes}: {answer}");
                assert_eq!(check_received(&mut good, &body), 1, "{bytes}");
            }
            refused += check_received(&mut busy, &body);
        }
    }
    // The busy worker answers before a long body is through and shows short ones alone: three framings of one, at least once each.
    assert!(refused >= 3, "only {refused} were seen to be sent twice");
}

/// REQ-03: the default is 64 MiB, and who is above it reads so in JSON.
#[tokio::test]
async fn a_body_over_the_default_limit_is_told_the_limit() {
    let balancer = balancer("").await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: b\r\ncontent-length: 67108865\r\nconnection: close\r\n\r\n");
    let answer = talk(balancer.http, &head).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("application/json"), "{answer}");
    assert!(answer.contains("over the limit of 64.0 MiB"), "{answer}");
}
