//! Which headers cross the balancer, both ways.
//!
//! **Invariant:** hop-by-hop headers, those that `Connection` names, all `x-fovea-*` and headers that name an upstream end here.

use fovea_gossip::preamble;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use pingora_http::{RequestHeader, ResponseHeader};

use crate::tenants::KEY_HEADERS;

/// Names a request in logs of every hop.
pub const REQUEST_ID: &str = "x-request-id";
/// Ours, and those by which others name an engine to send a request to: a client must not choose an upstream.
const INTERNAL: [&str; 4] = ["x-fovea-", "x-prefiller-", "x-data-parallel-", "x-gateway-destination-"];
/// Longest client-made request id that is kept, in bytes.
const REQUEST_ID_MAX: usize = 128;

fn is_hop_by_hop(name: &HeaderName) -> bool {
    const NAMES: [&str; 9] = [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    NAMES.contains(&name.as_str())
}

/// Is a body's framing named once, as chunks or not at all? The HTTP layer takes `chunked, chunked` for one coding; a proxy before us may not.
pub fn has_one_framing(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let first = codings.next().is_none_or(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"));
    first && codings.next().is_none()
}

fn is_internal(name: &HeaderName) -> bool {
    INTERNAL.iter().any(|prefix| name.as_str().starts_with(prefix))
}

/// Headers that cross to the next hop, in their order.
fn crossing(headers: &HeaderMap) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    headers.iter().filter(move |(name, _)| {
        !is_hop_by_hop(name) && !is_internal(name) && !named.iter().any(|hop| hop == name.as_str())
    })
}

/// What goes to a sidecar besides the client's headers.
pub struct Outgoing<'a> {
    pub path: &'a str,
    /// Host and port of the sidecar.
    pub authority: &'a str,
    pub request_id: &'a str,
    pub content_bytes: usize,
    /// Of these, the preamble; 0 = an engine without a sidecar, which is told nothing of ours.
    pub preamble_bytes: usize,
    pub key: Option<&'a HeaderValue>,
    /// API keys of clients end here.
    pub keys_stop: bool,
    /// `Authorization` for the engine.
    pub engine_key: Option<&'a HeaderValue>,
}

/// The head of the request to a sidecar.
///
/// # Errors
/// When a header cannot be written, which valid client headers never cause.
pub fn to_sidecar(client: &HeaderMap, out: &Outgoing) -> pingora_core::Result<RequestHeader> {
    let mut head = RequestHeader::build("POST", out.path.as_bytes(), Some(client.len() + 4))?;
    for (name, value) in crossing(client) {
        let replaced = [header::HOST, header::CONTENT_LENGTH, header::EXPECT];
        let stops = out.keys_stop && KEY_HEADERS.contains(name);
        if !replaced.contains(name) && name.as_str() != REQUEST_ID && !stops {
            head.append_header(name.clone(), value.clone())?;
        }
    }
    head.insert_header(header::HOST, out.authority)?;
    head.insert_header(header::CONTENT_LENGTH, out.content_bytes.to_string())?;
    head.insert_header(REQUEST_ID, out.request_id)?;
    if out.preamble_bytes > 0 {
        head.insert_header(preamble::HEADER, out.preamble_bytes.to_string())?;
    }
    if let Some(key) = out.engine_key {
        head.insert_header(header::AUTHORIZATION, key.clone())?;
    }
    if let Some(key) = out.key {
        head.insert_header(preamble::KEY_HEADER, key.clone())?;
    }
    Ok(head)
}

/// The head of the response to a client. `h2`: framing is the protocol's own; `close_delimited`: an HTTP/1.0 client.
///
/// # Errors
/// As [`to_sidecar`].
pub fn to_client(upstream: &ResponseHeader, h2: bool, close_delimited: bool) -> pingora_core::Result<ResponseHeader> {
    let mut head = ResponseHeader::build(upstream.status, Some(upstream.headers.len() + 6))?;
    for (name, value) in crossing(&upstream.headers) {
        head.append_header(name.clone(), value.clone())?;
    }
    if !h2 && !close_delimited && !head.headers.contains_key(header::CONTENT_LENGTH) {
        head.insert_header(header::TRANSFER_ENCODING, "chunked")?;
    }
    Ok(head)
}

/// The client's request id when it can be passed on as it is.
pub fn request_id(client: &HeaderMap) -> Option<String> {
    let id = client.get(REQUEST_ID)?.to_str().ok()?;
    let fine = !id.is_empty() && id.len() <= REQUEST_ID_MAX && id.bytes().all(|byte| byte.is_ascii_graphic());
    fine.then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rows: &[(&'static str, &'static str)]) -> HeaderMap {
        rows.iter().map(|(k, v)| (HeaderName::from_static(k), HeaderValue::from_static(v))).collect()
    }

    fn outgoing(preamble_bytes: usize) -> Outgoing<'static> {
        Outgoing {
            path: "/v1/completions",
            authority: "10.0.0.1:8000",
            request_id: "r1",
            content_bytes: 9,
            preamble_bytes,
            key: None,
            keys_stop: false,
            engine_key: None,
        }
    }

    #[test]
    fn hop_by_hop_and_our_own_headers_end_here() {
        let client = map(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("transfer-encoding", "chunked"),
            ("expect", "100-continue"),
            ("x-fovea-preamble", "7"),
            ("x-fovea-worker", "w"),
            ("x-prefiller-host-port", "10.0.0.1:80"),
            ("x-gateway-destination-endpoint", "10.0.0.1:80"),
            ("x-data-parallel-rank", "1"),
            ("content-length", "5"),
            ("host", "public"),
            ("authorization", "Bearer t"),
            ("x-request-id", "bad one"),
        ]);
        let head = to_sidecar(&client, &outgoing(4)).unwrap();
        let mut names: Vec<_> = head.headers.iter().map(|(k, v)| format!("{k}={}", v.to_str().unwrap())).collect();
        names.sort();
        let expect = [
            "authorization=Bearer t",
            "content-length=9",
            "host=10.0.0.1:8000",
            "x-fovea-preamble=4",
            "x-request-id=r1",
        ];
        assert_eq!(names, expect);
        let plain = to_sidecar(&client, &outgoing(0)).unwrap();
        assert!(plain.headers.keys().all(|name| !is_internal(name)), "an engine without a sidecar");
    }

    #[test]
    fn keys_of_clients_end_here_where_they_were_checked() {
        let client = map(&[("authorization", "Bearer client"), ("api-key", "client"), ("x-api-key", "client")]);
        let engine = HeaderValue::from_static("Bearer engine");
        let sent = |engine_key| {
            let head = to_sidecar(&client, &Outgoing { keys_stop: true, engine_key, ..outgoing(4) }).unwrap();
            KEY_HEADERS.iter().flat_map(|name| head.headers.get_all(name)).cloned().collect::<Vec<_>>()
        };
        assert_eq!((sent(None), sent(Some(&engine))), (Vec::new(), vec![engine.clone()]));
    }

    #[test]
    fn a_response_without_length_is_chunked_for_http_1_1() {
        let mut upstream = ResponseHeader::build(200, None).unwrap();
        upstream.insert_header("connection", "keep-alive").unwrap();
        upstream.insert_header("x-fovea-spoof", "1").unwrap();
        let names = |h2, close| {
            let head = to_client(&upstream, h2, close).unwrap();
            head.headers.iter().map(|(k, _)| k.to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(false, false), "transfer-encoding");
        assert_eq!((names(true, false), names(false, true)), (String::new(), String::new()));
    }

    #[test]
    fn chunks_are_named_once() {
        let fine = |codings: &[&'static str]| {
            has_one_framing(
                &codings.iter().map(|coding| (header::TRANSFER_ENCODING, HeaderValue::from_static(coding))).collect(),
            )
        };
        assert!(fine(&[]) && fine(&["chunked"]) && fine(&["Chunked"]));
        for codings in [&["chunked, chunked"][..], &["chunked", "chunked"], &["gzip, chunked"], &["identity"], &[""]] {
            assert!(!fine(codings), "{codings:?}");
        }
    }

    #[test]
    fn only_plain_request_ids_are_kept() {
        assert_eq!(request_id(&map(&[("x-request-id", "a-1")])).as_deref(), Some("a-1"));
        assert_eq!(request_id(&map(&[("x-request-id", "a b")])), None);
        assert_eq!(request_id(&map(&[])), None);
    }
}
