use std::collections::HashMap;
use std::time::Duration;

use zeromq::{PullSocket, Socket, SocketRecv};

use super::rendezvous::{Limits, MatchError, Rendezvous};
use super::wire::{Destination, Hosts, Receiver, WireError, parse_encode, parse_receiver};
use super::*;
use crate::format::pickle::Modality;
use crate::tensor::{DType, Embedding, Expect, check};

fn frames(number: u8) -> Frames {
    Frames { head: vec![number].into(), rows: Some(vec![number; 4].into()) }
}

fn receiver(req_id: &str, receive_count: u32, port: u16) -> Receiver {
    Receiver { req_id: req_id.to_owned(), receive_count, to: Destination::parse(&format!("10.0.0.1:{port}")).unwrap() }
}

fn ports(sends: &[rendezvous::Send]) -> Vec<String> {
    sends.iter().map(|send| format!("{} {}", send.req_id, send.to)).collect()
}

#[test]
fn either_side_may_come_first() {
    let mut parts = Rendezvous::new(Limits::default());
    assert_eq!(parts.receiver(receiver("a", 2, 1), 0), Ok(vec![]));
    assert_eq!(ports(&parts.encoded("a", frames(1), 1).unwrap()), ["a tcp://10.0.0.1:1"]);
    assert_eq!(parts.receiver(receiver("a", 2, 1), 2), Ok(vec![]), "the same receiver again");
    assert_eq!(ports(&parts.receiver(receiver("a", 2, 2), 2).unwrap()), ["a tcp://10.0.0.1:2"]);
    assert!(parts.is_empty() && parts.next_deadline_ms().is_none());
}

#[test]
fn what_finds_no_partner_in_time_is_forgotten() {
    let mut parts = Rendezvous::new(Limits { parts_max: 2, wait_ms: 100 });
    parts.encoded("a", frames(1), 0).unwrap();
    parts.receiver(receiver("b", 1, 1), 50).unwrap();
    assert_eq!(parts.receiver(receiver("c", 1, 1), 60), Err(MatchError::Full { parts_max: 2 }));
    assert_eq!((parts.next_deadline_ms(), parts.expire(99)), (Some(100), vec![]));
    assert_eq!(parts.expire(149), ["a"]);
    assert_eq!(parts.expire(150), ["b"]);
    assert_eq!(parts.receiver(receiver("a", 1, 1), 160), Ok(vec![]), "its answer is gone");
}

#[test]
fn contradictions_are_refused() {
    let mut parts = Rendezvous::new(Limits::default());
    parts.encoded("a", frames(1), 0).unwrap();
    assert!(matches!(parts.encoded("a", frames(1), 0), Err(MatchError::Encoded { .. })));
    parts.receiver(receiver("a", 3, 1), 0).unwrap();
    assert_eq!(parts.receiver(receiver("a", 2, 2), 0), Err(MatchError::Count { found: 2, wanted: 3 }));
    parts.cancel("a");
    assert!(parts.is_empty());
}

#[test]
fn in_any_order_each_receiver_is_served_once_and_nothing_stays() {
    for seed in 1..200_u64 {
        let mut state = seed;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut parts = Rendezvous::new(Limits { parts_max: 64, wait_ms: 1000 });
        let mut steps: Vec<(u64, u64)> =
            (0..8).flat_map(|part| (0..=part % 3 + 1).map(move |step| (part, step))).collect();
        let mut served: HashMap<String, u32> = HashMap::new();
        while !steps.is_empty() {
            let (part, step) = steps.swap_remove(random(steps.len() as u64) as usize);
            let req_id = format!("r{part}");
            let sends = match step {
                0 => parts.encoded(&req_id, frames(part as u8), 0),
                port => parts.receiver(receiver(&req_id, (part % 3 + 1) as u32, port as u16), 0),
            };
            for send in sends.unwrap() {
                assert_eq!(send.frames, frames(part as u8), "seed {seed}");
                *served.entry(format!("{} {}", send.req_id, send.to)).or_default() += 1;
            }
        }
        assert!(parts.is_empty(), "seed {seed}");
        assert!(served.len() == 15 && served.values().all(|&count| count == 1), "seed {seed}: {served:?}");
    }
}

#[test]
fn requests_are_held_to_their_bounds() {
    let encode = |body: &str| parse_encode(body.as_bytes(), &Hosts::Any);
    let good = r#"{"req_id": "r_local_part_0", "mm_items": ["u", {"url": "v", "detail": "low"}], "modality": "IMAGE",
        "num_parts": 2, "part_idx": 1, "encoder_idx": 0, "prefill_host": "h", "embedding_port": null}"#;
    let request = encode(good).unwrap();
    assert_eq!(
        (request.urls.as_slice(), request.part_idx, request.direct),
        (&["u".to_owned(), "v".to_owned()][..], 1, None)
    );
    let direct = encode(&good.replace("null", "4000")).unwrap().direct.unwrap();
    assert_eq!(direct.to_string(), "tcp://h:4000");
    for (from, to, field) in [
        (r#""part_idx": 1"#, r#""part_idx": 2"#, "part_idx"),
        ("IMAGE", "SMELL", "modality"),
        (r#"["u", {"url": "v", "detail": "low"}]"#, "[]", "mm_items"),
        (r#""u", "#, "7, ", "mm_items"),
        (r#""num_parts": 2"#, r#""num_parts": 2000000"#, "num_parts"),
        ("null", "70000", "embedding_port"),
    ] {
        let error = encode(&good.replace(from, to)).unwrap_err();
        assert!(matches!(error, WireError::Field { field: found, .. } if found == field), "{error}");
        assert!(error.body().starts_with(r#"{"status":"error","message":""#), "{}", error.body());
    }
    assert_eq!(encode("[]"), Err(WireError::NoObject));
    let url = |url: &str, hosts: &Hosts| {
        let body = format!(r#"{{"req_id": "r", "receive_count": 1, "receive_url": "{url}", "modality": "IMAGE"}}"#);
        parse_receiver(body.as_bytes(), hosts)
    };
    assert_eq!(url("[::1]:9", &Hosts::Any).unwrap().to.to_string(), "tcp://[::1]:9");
    for bad in ["h", "h:0", "h:99999", "h/x:1", ":1", "a b:1"] {
        assert!(url(bad, &Hosts::Any).is_err(), "{bad}");
    }
    let only = Hosts::Only(vec!["10.0.0.1".to_owned()]);
    assert!(url("10.0.0.1:5", &only).is_ok());
    assert!(matches!(url("169.254.169.254:80", &only), Err(WireError::Host { .. })));
}

pub(super) fn checked(rows: u32, grid: [u32; 3]) -> Arc<Checked> {
    let data = vec![rows as u8; rows as usize * 16].into();
    let embedding = Embedding { rows, width: 8, dtype: DType::Bf16, data, grid_thw: Some(grid) };
    Arc::new(check(embedding, &Expect { width: 8, rows: None, merge: Some(2), dtype: None }).unwrap())
}

#[test]
fn several_images_of_a_part_go_as_one_tensor() {
    let part = Part { req_id: "r", num_parts: 1, part_idx: 0, modality: Modality::Image };
    let two = Frames::of_images(part, &[checked(6, [1, 4, 6]), checked(2, [1, 2, 4])]).unwrap();
    assert_eq!(two.rows.unwrap().len(), 8 * 16);
    let wanted = Outcome::Embedding { grid: &[[1, 4, 6], [1, 2, 4]], shape: [8, 8], dtype: DType::Bf16 };
    assert_eq!(two.head, pickle::embedding_data(part, wanted));
    assert!(Frames::of_images(part, &[]).is_err());
}

#[test]
fn versions_of_an_unknown_layout_are_told() {
    assert_eq!(Layout::for_version("0.5.23"), Some(Layout::V0523));
    assert_eq!(Layout::for_version("v0.5.24.post1"), Some(Layout::V0523));
    for unknown in ["0.5.22", "0.6.0", "1.0", "", "main"] {
        assert_eq!(Layout::for_version(unknown), None, "{unknown}");
    }
}

#[tokio::test]
async fn rows_reach_a_pull_socket_in_two_frames() {
    let mut pull = PullSocket::new();
    let at = pull.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let to = Destination::parse(at.trim_start_matches("tcp://")).unwrap();
    let rows = Bytes::from(vec![7; 4 << 20]);
    let sent = Frames { head: Bytes::from_static(b"head"), rows: Some(rows.clone()) };
    let send = rendezvous::Send { req_id: "r".to_owned(), to: to.clone(), frames: sent };
    let (pushed, message) = tokio::join!(push::push(send, Duration::from_secs(20)), pull.recv());
    pushed.unwrap();
    let frames = message.unwrap().into_vec();
    assert_eq!(frames, [Bytes::from_static(b"head"), rows]);
    let failed = Frames { head: Bytes::from_static(b"failed"), rows: None };
    let send = rendezvous::Send { req_id: "r".to_owned(), to, frames: failed };
    let (pushed, message) = tokio::join!(push::push(send, Duration::from_secs(20)), pull.recv());
    pushed.unwrap();
    assert_eq!(message.unwrap().into_vec(), [Bytes::from_static(b"failed")]);
}
