//! Which headers cross the sidecar.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Prefixes of headers between balancer and sidecar, and of those by which others name an engine to send a request to; they never
/// reach an engine or come from one.
const INTERNAL: [&str; 4] = ["x-fovea-", "x-prefiller-", "x-data-parallel-", "x-gateway-destination-"];
/// Pins a rank in vLLM: set by us, never by a client.
pub const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// Tells a balancer why there is no good answer: `died`, the engine ended under this request; `draining`, it takes no new ones.
pub const ENGINE: HeaderName = HeaderName::from_static("x-fovea-engine");
/// Key of a balancer.
pub const KEY: HeaderName = HeaderName::from_static(fovea_gossip::preamble::KEY_HEADER);

const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Removes hop-by-hop headers, those that `Connection` names, and ours. Good for both directions.
pub fn strip_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    let is_internal = |name: &&HeaderName| INTERNAL.iter().any(|prefix| name.as_str().starts_with(prefix));
    let internal: Vec<HeaderName> = headers.keys().filter(is_internal).cloned().collect();
    for name in &internal {
        headers.remove(name);
    }
}

/// Makes a client's head fit for the engine; the body's length is set later, by who knows it.
pub fn strip_request(headers: &mut HeaderMap) {
    strip_hop(headers);
    for name in [header::HOST, header::CONTENT_LENGTH, header::EXPECT, RANK] {
        headers.remove(name);
    }
}

/// Equal, in a time that depends on the lengths only.
pub fn same_key(sent: &HeaderValue, key: &[u8]) -> bool {
    let sent = sent.as_bytes();
    let differs = sent.iter().zip(key).fold(0u8, |differs, (a, b)| differs | (a ^ b));
    std::hint::black_box(differs) == 0 && sent.len() == key.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn only_end_to_end_headers_of_others_cross() {
        let mut sent = headers(&[
            ("connection", "keep-alive, X-Private"),
            ("keep-alive", "timeout=5"),
            ("x-private", "1"),
            ("x-fovea-worker", "w"),
            ("x-fovea-preamble", "9"),
            ("x-prefiller-host-port", "10.0.0.1:80"),
            ("x-gateway-destination-endpoint", "10.0.0.1:80"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("host", "a"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("x-data-parallel-rank", "3"),
            ("authorization", "Bearer k"),
            ("x-request-id", "r"),
            ("content-type", "application/json"),
        ]);
        strip_request(&mut sent);
        let mut left: Vec<_> = sent.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["authorization", "content-type", "x-request-id"]);
    }

    #[test]
    fn keys_are_equal_only_as_a_whole() {
        for (sent, same) in [("secret", true), ("secre", false), ("secrets", false), ("Secret", false), ("", false)] {
            assert_eq!(same_key(&HeaderValue::from_str(sent).unwrap(), b"secret"), same, "{sent}");
        }
    }
}
