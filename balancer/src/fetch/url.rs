//! What a URL asks for, and whether it may: scheme, port, spelling of the host. Addresses come later, with names resolved.
//!
//! **Invariant:** a URL that two parsers could read differently is refused, so that what is checked is what anyone would dial.

use std::net::IpAddr;

use ::url::{Host, Position, Url};

use super::error::Reason;
use crate::config::media::{MediaConfig, Scheme};

/// Longest URL, in bytes.
const URL_BYTES_MAX: usize = 8192;
/// Longest host name, in bytes (RFC 1035).
const HOST_BYTES_MAX: usize = 253;

/// A URL that passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    url: Url,
    pub port: u16,
    pub tls: bool,
}

/// Schemes and ports of the config.
pub(super) struct Urls {
    schemes: Vec<Scheme>,
    ports: Vec<u16>,
}

impl Urls {
    pub fn new(config: &MediaConfig) -> Self {
        Self { schemes: config.schemes.clone(), ports: config.ports.clone() }
    }

    /// A URL as a client wrote it.
    pub fn first(&self, text: &str) -> Result<Target, Reason> {
        plain(text)?;
        let url = Url::parse(text).map_err(|_| Reason::BadUrl)?;
        self.check(url, authority(text))
    }

    /// Where a redirect leads.
    pub fn next(&self, from: &Target, location: &str) -> Result<Target, Reason> {
        plain(location)?;
        let url = from.url.join(location).map_err(|_| Reason::BadUrl)?;
        match authority(location) {
            None if url.host() != from.url.host() || url.scheme() != from.url.scheme() => Err(Reason::BadUrl),
            None => self.check(url, Some(&from.url[Position::BeforeUsername..Position::AfterPort])),
            written => self.check(url, written),
        }
    }

    fn check(&self, mut url: Url, written: Option<&str>) -> Result<Target, Reason> {
        let scheme = match url.scheme() {
            "http" => Scheme::Http,
            "https" => Scheme::Https,
            _ => return Err(Reason::Scheme),
        };
        if !self.schemes.contains(&scheme) {
            return Err(Reason::Scheme);
        }
        let written = written.ok_or(Reason::BadUrl)?;
        if written.contains('@') || !url.username().is_empty() || url.password().is_some() {
            return Err(Reason::Userinfo);
        }
        match url.host() {
            Some(Host::Ipv4(address)) if host_part(written) != address.to_string() => return Err(Reason::HostForm),
            Some(_) if host_part(written).is_empty() => return Err(Reason::BadUrl),
            Some(Host::Domain(name)) if name.is_empty() || name.len() > HOST_BYTES_MAX => return Err(Reason::BadUrl),
            None => return Err(Reason::BadUrl),
            Some(_) => {}
        }
        let port = url.port_or_known_default().filter(|port| *port != 0).ok_or(Reason::Port)?;
        if !self.ports.is_empty() && !self.ports.contains(&port) {
            return Err(Reason::Port);
        }
        url.set_fragment(None);
        Ok(Target { url, port, tls: scheme == Scheme::Https })
    }
}

impl Target {
    pub fn as_str(&self) -> &str {
        self.url.as_str()
    }

    /// Name, or address without brackets.
    pub fn host(&self) -> String {
        match self.url.host() {
            Some(Host::Ipv6(address)) => address.to_string(),
            _ => self.url.host_str().unwrap_or_default().to_owned(),
        }
    }

    /// The host when it is an address.
    pub fn address(&self) -> Option<IpAddr> {
        match self.url.host()? {
            Host::Ipv4(address) => Some(address.into()),
            Host::Ipv6(address) => Some(address.into()),
            Host::Domain(_) => None,
        }
    }

    /// For the `Host` header.
    pub fn authority(&self) -> &str {
        &self.url[Position::BeforeHost..Position::AfterPort]
    }

    /// For the request line.
    pub fn path_and_query(&self) -> &str {
        &self.url[Position::BeforePath..Position::AfterQuery]
    }
}

/// Host, port and path: what variants of one signed URL have in common.
pub(super) fn without_query(url: &str) -> Option<String> {
    let url = Url::parse(url).ok()?;
    Some(url[Position::BeforeHost..Position::AfterPath].to_owned())
}

/// The URL as it is asked for: two that differ in nothing an origin sees are one.
pub(super) fn normalised(url: &str) -> Option<String> {
    let mut url = Url::parse(url).ok()?;
    url.set_fragment(None);
    Some(url.into())
}

/// No blanks, control characters or backslashes, which URL parsers drop or turn.
fn plain(text: &str) -> Result<(), Reason> {
    let odd = |byte: u8| byte <= b' ' || byte == 0x7f || byte == b'\\';
    if text.len() > URL_BYTES_MAX || text.bytes().any(odd) { Err(Reason::BadUrl) } else { Ok(()) }
}

/// What is written between `//` and the path; `None` for a path alone.
fn authority(text: &str) -> Option<&str> {
    let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let rest = match text.strip_prefix("//") {
        Some(rest) => rest,
        None => text.split_once("://").filter(|(scheme, _)| is_scheme(scheme))?.1,
    };
    rest.split(['/', '?', '#']).next()
}

fn host_part(authority: &str) -> &str {
    authority.split_once(':').map_or(authority, |(host, _)| host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls() -> Urls {
        Urls::new(&MediaConfig::default())
    }

    #[track_caller]
    fn check(text: &str, expect: Result<&str, Reason>) {
        let got = urls().first(text);
        assert_eq!(got.as_ref().map(Target::as_str).map_err(|reason| *reason), expect, "{text}");
    }

    #[test]
    fn plain_urls_pass() {
        check("https://example.com/a.png?x=1#y", Ok("https://example.com/a.png?x=1"));
        check("HTTP://Example.COM:80", Ok("http://example.com/"));
        check("http://8.8.8.8/a", Ok("http://8.8.8.8/a"));
        check("http://[2606:4700::1111]/a", Ok("http://[2606:4700::1111]/a"));
        check("https://bücher.example/", Ok("https://xn--bcher-kva.example/"));
    }

    #[test]
    fn other_schemes_are_refused() {
        for text in ["ftp://example.com/", "file:///etc/passwd", "gopher://example.com/", "data:image/png;base64,AA"] {
            check(text, Err(Reason::Scheme));
        }
    }

    #[test]
    fn addresses_in_other_notations_are_refused() {
        let hosts = [
            "2130706433",
            "134744072",
            "0x7f000001",
            "0x7f.0.0.1",
            "0177.0.0.1",
            "127.1",
            "127.0.1",
            "00000177.1",
            "127.0.0.1.",
            "%31%32%37.0.0.1",
            "①②⑦.⓪.⓪.①",
            "１２７.0.0.1",
            "0",
            "0x8.8.8.8",
            "010.8.8.8",
            "8.8.8.8.",
        ];
        hosts.iter().for_each(|host| check(&format!("http://{host}/"), Err(Reason::HostForm)));
    }

    #[test]
    fn user_names_are_refused() {
        for text in
            ["http://a@example.com/", "http://a:b@example.com/", "http://@example.com/", "http://8.8.8.8@1.1.1.1/"]
        {
            check(text, Err(Reason::Userinfo));
        }
    }

    #[test]
    fn what_parsers_read_differently_is_refused() {
        for text in [
            "",
            "example.com",
            "http:/example.com/",
            "http:example.com",
            "http:\\\\example.com",
            "http://a\\@b/",
            "http://exa mple.com/",
            "http://example.com/\r\nHost: b",
            "http://\texample.com/",
            " http://example.com/",
            "http://exam\nple.com/",
            "http:///a",
            "http://[::1/",
            "http://[fe80::1%25eth0]/",
            "http://1.2.3.4.5/",
            "http://256.1.1.1/",
            "http://a..%00b/",
        ] {
            check(text, Err(Reason::BadUrl));
        }
        check(&format!("http://example.com/{}", "a".repeat(URL_BYTES_MAX)), Err(Reason::BadUrl));
    }

    #[test]
    fn other_ports_are_refused() {
        for text in ["http://example.com:22/", "http://example.com:0/", "https://example.com:6379/"] {
            check(text, Err(Reason::Port));
        }
    }

    #[test]
    fn redirects_are_read_against_their_url_and_checked_alike() {
        let from = urls().first("https://8.8.8.8/a/b?c").unwrap();
        let next = |location: &str| urls().next(&from, location).map(|target| target.as_str().to_owned());
        assert_eq!(next("../d"), Ok("https://8.8.8.8/d".to_owned()));
        assert_eq!(next("//example.com/d"), Ok("https://example.com/d".to_owned()));
        assert_eq!(next("http://example.com/d://e"), Ok("http://example.com/d://e".to_owned()));
        assert_eq!(next("d?u=http://x/"), Ok("https://8.8.8.8/a/d?u=http://x/".to_owned()));
        assert_eq!(next("//2130706433/"), Err(Reason::HostForm));
        assert_eq!(next("http:2130706433"), Err(Reason::BadUrl));
        assert_eq!(next("https:/d"), Ok("https://8.8.8.8/d".to_owned()));
        assert_eq!(next("http://example.com:22/"), Err(Reason::Port));
        assert_eq!(next("http://a@example.com/"), Err(Reason::Userinfo));
        assert_eq!(next("ftp://example.com/"), Err(Reason::Scheme));
        assert_eq!(next("\\\\example.com/"), Err(Reason::BadUrl));
    }
}
