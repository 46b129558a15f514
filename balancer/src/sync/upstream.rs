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
    /// `http://` or `https://` and the resolved address.
    pub url: String,
    address: SocketAddr,
    /// As advertised, without the port: what the certificate of an https sidecar is for.
    host: String,
}

impl Upstream {
    /// Address and host of an https sidecar.
    pub fn secure(&self) -> Option<(SocketAddr, &str)> {
        self.url.starts_with("https://").then_some((self.address, self.host.as_str()))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    #[error("advertised url `{url}` is not of the form http://host:port; correct advertised_url in sidecar.yaml")]
    Form { url: String },
    #[error(
        "advertised url `{url}` is https and this balancer has no certificates for that; set sidecar_tls in balancer.yaml"
    )]
    NoTls { url: String },
    #[error("advertised host `{host}` does not resolve; advertise an address that this balancer can reach")]
    Unresolved { host: String },
}

/// Resolves `http://host:port`, or https where `tls` is set up. An unspecified address (`0.0.0.0`) stands for the one the stream comes from.
pub async fn resolve(url: &str, peer: IpAddr, tls: bool) -> Result<Upstream, UrlError> {
    let shown = || url.chars().take(200).collect();
    let (scheme, name) = parts(url).ok_or_else(|| UrlError::Form { url: shown() })?;
    if scheme == "https" && !tls {
        return Err(UrlError::NoTls { url: shown() });
    }
    let address = match name.parse::<SocketAddr>() {
        Ok(address) => address,
        Err(_) => {
            let found = tokio::time::timeout(RESOLVE_TIME_MAX, tokio::net::lookup_host(&name)).await;
            let first = found.ok().and_then(Result::ok).and_then(|mut all| all.next());
            first.ok_or_else(|| UrlError::Unresolved { host: name.clone() })?
        }
    };
    let (address, name) = match address.ip().is_unspecified() {
        true => (SocketAddr::new(peer, address.port()), SocketAddr::new(peer, address.port()).to_string()),
        false => (address, name),
    };
    let host = name.rsplit_once(':').map_or(name.as_str(), |(host, _)| host).to_owned();
    Ok(Upstream { url: format!("{scheme}://{address}"), name, address, host })
}

/// Scheme and authority.
fn parts(url: &str) -> Option<(&'static str, String)> {
    let uri: http::Uri = url.parse().ok()?;
    let authority = uri.authority()?;
    let scheme = ["http", "https"].into_iter().find(|scheme| uri.scheme_str() == Some(scheme))?;
    let plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
    let named = authority.port_u16().is_some() && !authority.as_str().contains('@');
    (plain && named).then(|| (scheme, authority.as_str().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn check(url: &str, expect: Option<(&str, &str)>) {
        let got = resolve(url, [10, 0, 0, 9].into(), false).await.ok();
        assert_eq!(got.as_ref().map(|got| (got.name.as_str(), got.url.as_str())), expect, "{url}");
        assert!(got.is_none_or(|got| got.secure().is_none()));
    }

    #[tokio::test]
    async fn https_is_taken_where_it_can_be_spoken() {
        let peer = [10, 0, 0, 9].into();
        for (url, address, host) in [
            ("https://10.0.0.7:8000", "10.0.0.7:8000", "10.0.0.7"),
            ("https://0.0.0.0:8000/", "10.0.0.9:8000", "10.0.0.9"),
            ("https://[::1]:8000", "[::1]:8000", "[::1]"),
            ("https://localhost:8000", "127.0.0.1:8000", "localhost"),
        ] {
            let got = resolve(url, peer, true).await.unwrap();
            let at: SocketAddr = address.parse().unwrap();
            // Where localhost stands for ::1 first, that is the address.
            assert!(
                got.secure().is_some_and(|(to, named)| named == host && (to == at || host == "localhost")),
                "{got:?}"
            );
            assert!(matches!(resolve(url, peer, false).await, Err(UrlError::NoTls { .. })), "{url}");
        }
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
