//! Where only an image's header is wanted.

use fovea_balancer::config::media::IdentityPolicy;
use fovea_balancer::fetch::{Reason, Source};

use super::support::{Reply, fetcher, origin, png, tagged, within};

/// A JPEG whose size comes after `before` bytes of comments.
fn jpeg(before: usize) -> Vec<u8> {
    let mut bytes = b"\xff\xd8".to_vec();
    let mut left = before;
    while left > 0 {
        let piece = left.min(60_000);
        bytes.extend(b"\xff\xfe");
        bytes.extend((piece as u16 + 2).to_be_bytes());
        bytes.resize(bytes.len() + piece, b'c');
        left -= piece;
    }
    bytes.extend(b"\xff\xc0\0\x11\x08\0\x20\0\x30\x03\x01\x11\0\x02\x11\x01\x03\x11\x01\xff\xda\0\x0c\x03\x01\0\x02\x11\x03\x11\0\x3f\0");
    bytes.resize(bytes.len() + 200_000, 0x55);
    bytes.extend(b"\xff\xd9");
    bytes
}

/// Serves ranges of `file` as asked.
fn ranged(head: &str, file: &[u8]) -> Reply {
    let head = head.to_ascii_lowercase();
    let last: usize = head.split("range: bytes=0-").nth(1).unwrap().split("\r\n").next().unwrap().parse().unwrap();
    let piece = &file[..(last + 1).min(file.len())];
    let range = format!("bytes 0-{}/{}", piece.len() - 1, file.len());
    Reply::Plain("206 Partial Content", vec![("Content-Range", range), ("ETag", "\"t\"".to_owned())], piece.to_vec())
}

#[tokio::test]
async fn four_kilobytes_tell_most_sizes() {
    let origin = origin(|head, _| ranged(head, &jpeg(100))).await;
    let tested = fetcher("");
    let looked = within(tested.fetcher.look(&origin.url("/a"))).await.unwrap();
    assert_eq!(looked.header.unwrap().upright(), (48, 32));
    assert_eq!((looked.bytes.len(), looked.complete, looked.length), (4096, false, Some(jpeg(100).len() as u64)));
    assert_eq!(origin.count(), 1);
}

#[tokio::test]
async fn a_late_size_takes_a_second_and_larger_piece() {
    let origin = origin(|head, _| ranged(head, &jpeg(40_000))).await;
    let tested = fetcher("");
    let looked = within(tested.fetcher.look(&origin.url("/a"))).await.unwrap();
    assert_eq!(looked.header.unwrap().upright(), (48, 32));
    assert_eq!((looked.bytes.len(), origin.count()), (64 << 10, 2));
}

#[tokio::test]
async fn a_size_beyond_the_largest_piece_is_unknown_and_no_error() {
    let origin = origin(|head, _| ranged(head, &jpeg(80_000))).await;
    let looked = within(fetcher("").fetcher.look(&origin.url("/a"))).await.unwrap();
    assert!(looked.header.is_err());
    assert_eq!(origin.count(), 2);
}

#[tokio::test]
async fn an_origin_without_ranges_is_read_up_to_the_bound_once() {
    for before in [100, 40_000, 80_000] {
        let origin = origin(move |_, _| tagged("\"t\"", &jpeg(before))).await;
        let tested = fetcher("");
        let looked = within(tested.fetcher.look(&origin.url("/a"))).await.unwrap();
        assert_eq!(looked.header.is_ok(), before < 64 << 10);
        assert_eq!((looked.bytes.len(), looked.length), (64 << 10, Some(jpeg(before).len() as u64)));
        assert_eq!(origin.count(), 1);
    }
}

#[tokio::test]
async fn an_endless_answer_to_a_range_is_cut() {
    let head = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
    let origin = origin(move |_, _| Reply::Endless([&head[..], &jpeg(100)].concat(), vec![0x55; 4096])).await;
    let looked = within(fetcher("").fetcher.look(&origin.url("/a"))).await.unwrap();
    assert_eq!((looked.bytes.len(), looked.complete, looked.length), (64 << 10, false, None));
}

#[tokio::test]
async fn a_small_file_is_known_to_be_whole() {
    let file = png(5, 6, 100);
    let length = file.len() as u64;
    let origin = origin(move |head, _| ranged(head, &file)).await;
    let looked = within(fetcher("").fetcher.look(&origin.url("/a"))).await.unwrap();
    assert_eq!((looked.complete, looked.length, looked.header.unwrap().upright()), (true, Some(length), (5, 6)));
}

#[tokio::test]
async fn another_piece_than_asked_for_is_refused() {
    for range in ["bytes 5-10/11", "bytes */11", "items 0-5/6", "bytes 0-5"] {
        let origin = origin(move |_, _| {
            Reply::Plain("206 Partial Content", vec![("Content-Range", range.to_owned())], vec![0; 6])
        })
        .await;
        let error = within(fetcher("").fetcher.look(&origin.url("/a"))).await.unwrap_err();
        assert_eq!(error.cause, Reason::Protocol, "{range}");
    }
}

#[tokio::test]
async fn heads_are_confirmed_by_their_tag_too() {
    let origin = origin(|head, number| match number {
        0 => ranged(head, &jpeg(100)),
        _ => Reply::Plain("304 Not Modified", vec![], vec![]),
    })
    .await;
    let tested = fetcher("");
    within(tested.fetcher.look(&origin.url("/a"))).await.unwrap();
    let again = within(tested.fetcher.look(&origin.url("/a"))).await.unwrap();
    assert_eq!((again.source, again.header.unwrap().upright()), (Source::Revalidated, (48, 32)));
    assert!(origin.head(1).contains("if-none-match: \"t\""));
}

#[tokio::test]
async fn names_by_validator_leave_the_query_out_and_names_by_url_do_not() {
    let origin = origin(|head, _| ranged(head, &jpeg(100))).await;
    let tested = fetcher("");
    let (one, two) = (origin.url("/a?sig=1"), origin.url("/a?sig=2"));
    let first = within(tested.fetcher.look(&one)).await.unwrap();
    let second = within(tested.fetcher.look(&two)).await.unwrap();
    let key = |policy| (first.key(policy, &one), second.key(policy, &two));
    let (a, b) = key(IdentityPolicy::Validator);
    assert!(a.is_some() && a == b);
    let (a, b) = key(IdentityPolicy::Url);
    assert!(a.is_some() && a != b);
    assert_eq!(key(IdentityPolicy::Content), (None, None));
}
