//! What of the engine is open to others, and what this host gives the sidecar.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http::{Method, StatusCode};
use tokio::net::{TcpStream, UdpSocket};

use super::ask::Ask;
use super::family::{Danger, There};

/// Limit of one question.
const PATH: Duration = Duration::from_secs(2);
/// Limit of one dial to this host's own address.
const DIAL: Duration = Duration::from_secs(1);

/// Who can reach what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// What the paths that exist do, each said once.
    pub dangers: Vec<&'static str>,
    /// It could be told at all.
    pub answered: bool,
    /// An address from outside this host at which the engine's port answers.
    pub outside: Option<String>,
}

/// Finds out which paths exist, by methods without effect, and whether other hosts reach them.
pub async fn open(ask: &Ask, dangers: &[Danger]) -> Open {
    let mut open = Open { answered: dangers.iter().all(|danger| danger.there == There::Always), ..Open::default() };
    for danger in dangers {
        let exists = match danger.there {
            There::Always => Some(true),
            There::ByGet => exists(ask, Method::GET, danger.path).await,
            There::ByOptions => exists(ask, Method::OPTIONS, danger.path).await,
        };
        open.answered |= exists.is_some();
        if exists == Some(true) && !open.dangers.contains(&danger.what) {
            open.dangers.push(danger.what);
        }
    }
    open.outside = outside(ask).await;
    open
}

/// `None` = no answer.
async fn exists(ask: &Ask, method: Method, path: &str) -> Option<bool> {
    let answer = ask.bare(method, path, PATH).await.ok()?;
    Some(answer.status.is_success() || answer.status == StatusCode::METHOD_NOT_ALLOWED)
}

async fn outside(ask: &Ask) -> Option<String> {
    let uri = ask.base.parse::<http::Uri>().ok()?;
    let (host, port) = (uri.host()?, uri.port_u16().unwrap_or(80));
    if !is_loopback(host) {
        return Some(format!("{host}:{port}"));
    }
    let address = SocketAddr::new(own_address().await?, port);
    let dialled = tokio::time::timeout(ask.limit(DIAL), TcpStream::connect(address)).await;
    matches!(dialled, Ok(Ok(_))).then(|| address.to_string())
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The address from which this host would speak to others. Connecting a UDP socket sends nothing; 192.0.2.1 is nobody's (RFC 5737).
async fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").await.ok()?;
    socket.connect("192.0.2.1:9").await.ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

/// Files that this process may open, sockets included; `None` where `/proc` does not tell.
pub async fn files_max() -> Option<u64> {
    open_files(&tokio::fs::read_to_string("/proc/self/limits").await.ok()?)
}

/// The soft limit out of Linux's `/proc/PID/limits`.
fn open_files(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_of_files_is_read() {
        let page = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 524288               files     \n";
        assert_eq!(open_files(page), Some(1024));
        assert_eq!(open_files("Max open files  unlimited unlimited files"), Some(u64::MAX));
        assert_eq!(open_files(""), None);
    }

    #[test]
    fn loopback_has_many_names() {
        for (host, expect) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("[::1]", true),
            ("localhost", true),
            ("10.0.0.7", false),
            ("engine", false),
        ] {
            assert_eq!(is_loopback(host), expect, "{host}");
        }
    }
}
