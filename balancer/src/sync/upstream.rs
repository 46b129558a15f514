//! From the URL that a sidecar advertises to an address that requests can be sent to.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Longest wait for a name to resolve.
const RESOLVE_TIME_MAX: Duration = Duration::from_secs(2);

/// Where a sidecar takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// Host and port as advertised: the worker's name.
    pub name: String,
    /// `http://` and the resolved address.
    pub url: String,
}

#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    #[error("advertised url `{url}` is not of the form http://host:port; correct `advertise` in sidecar.yaml")]
    Form { url: String },
    #[error("advertised host `{host}` does not resolve; advertise an address that this balancer can reach")]
    Unresolved { host: String },
}

/// Resolves `http://host:port`. An unspecified address (`0.0.0.0`) stands for the one the stream comes from.
pub async fn resolve(url: &str, peer: IpAddr) -> Result<Upstream, UrlError> {
    let name = authority(url).ok_or_else(|| UrlError::Form { url: url.chars().take(200).collect() })?;
    let address = match name.parse::<SocketAddr>() {
        Ok(address) => address,
        Err(_) => {
            let found = tokio::time::timeout(RESOLVE_TIME_MAX, tokio::net::lookup_host(&name)).await;
            let first = found.ok().and_then(Result::ok).and_then(|mut all| all.next());
            first.ok_or_else(|| UrlError::Unresolved { host: name.clone() })?
        }
    };
    if address.ip().is_unspecified() {
        let address = SocketAddr::new(peer, address.port());
        return Ok(Upstream { name: address.to_string(), url: format!("http://{address}") });
    }
    Ok(Upstream { name, url: format!("http://{address}") })
}

fn authority(url: &str) -> Option<String> {
    let uri: http::Uri = url.parse().ok()?;
    let authority = uri.authority()?;
    let plain = uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/") && uri.query().is_none();
    let named = authority.port_u16().is_some() && !authority.as_str().contains('@');
    (plain && named).then(|| authority.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn check(url: &str, expect: Option<(&str, &str)>) {
        let got = resolve(url, [10, 0, 0, 9].into()).await.ok();
        let expect = expect.map(|(name, url)| Upstream { name: name.to_owned(), url: url.to_owned() });
        assert_eq!(got, expect, "{url}");
    }

    #[tokio::test]
    async fn only_plain_http_with_a_port_is_taken() {
        check("http://10.0.0.7:8000", Some(("10.0.0.7:8000", "http://10.0.0.7:8000"))).await;
        check("http://10.0.0.7:8000/", Some(("10.0.0.7:8000", "http://10.0.0.7:8000"))).await;
        check("http://0.0.0.0:8000", Some(("10.0.0.9:8000", "http://10.0.0.9:8000"))).await;
        check("http://[::1]:8000", Some(("[::1]:8000", "http://[::1]:8000"))).await;
        for url in
            ["", "10.0.0.7:8000", "https://10.0.0.7:1", "http://10.0.0.7", "http://a@10.0.0.7:1", "http://10.0.0.7:1/x"]
        {
            check(url, None).await;
        }
    }
}
