//! Why a file was not fetched. Texts are for clients: a rule and a remedy, never an address or a name.

use std::fmt;
use std::net::SocketAddr;

/// The closed set of causes, and the metric label. The `Debug` names are stable: `reason()` and labels are made of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Fetching is turned off.
    Disabled,
    BadUrl,
    Scheme,
    /// The URL carries a user name or password.
    Userinfo,
    Port,
    /// An IPv4 address in another notation than four decimal numbers.
    HostForm,
    /// The host has no address.
    Dns,
    /// An address of the host is not open to clients.
    Address,
    Connect,
    Tls,
    /// Not HTTP, or the answer broke off.
    Protocol,
    /// Too many redirects, or one that leads nowhere.
    Redirect,
    /// Any status but success.
    Status,
    ContentEncoding,
    BodyTooLarge,
    Pixels,
    Timeout,
    /// No room within our own limits in time.
    Busy,
}

fovea_service::snake_case_labels!(Reason);

/// Whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The URL or what it leads to: 400.
    Client,
    /// This balancer has no room: 503.
    Us,
}

/// A refusal or failure. What the operator may know beyond the text is in the fields; the text never shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchError {
    pub cause: Reason,
    /// The address that was dialled last or refused.
    pub address: Option<SocketAddr>,
    /// Status of the last answer.
    pub status: Option<u16>,
}

/// A [`FetchError`] with the place of its media part in the request, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("media part {part}: {error}")]
pub struct PartError {
    pub part: usize,
    #[source]
    pub error: FetchError,
}

impl FetchError {
    /// The cause in snake_case, as in `balancer_media_refusals_total{reason}`.
    pub fn reason(&self) -> &'static str {
        self.cause.name()
    }

    pub fn blame(&self) -> Blame {
        match self.cause {
            Reason::Busy => Blame::Us,
            _ => Blame::Client,
        }
    }

    /// HTTP status of the answer to the client.
    pub fn http_status(&self) -> u16 {
        match self.blame() {
            Blame::Client => 400,
            Blame::Us => 503,
        }
    }

    pub fn at(self, part: usize) -> PartError {
        PartError { part, error: self }
    }
}

impl From<Reason> for FetchError {
    fn from(cause: Reason) -> Self {
        Self { cause, address: None, status: None }
    }
}

impl std::error::Error for FetchError {}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.cause.text())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Reason {
    fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::BadUrl => "bad_url",
            Self::Scheme => "scheme",
            Self::Userinfo => "userinfo",
            Self::Port => "port",
            Self::HostForm => "host_form",
            Self::Dns => "dns",
            Self::Address => "address",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Protocol => "protocol",
            Self::Redirect => "redirect",
            Self::Status => "status",
            Self::ContentEncoding => "content_encoding",
            Self::BodyTooLarge => "body_too_large",
            Self::Pixels => "pixels",
            Self::Timeout => "timeout",
            Self::Busy => "busy",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Disabled => "media by URL is turned off here (disabled): send it inline as a data: URL",
            Self::BadUrl => "the URL cannot be read (bad_url): write it as scheme://host/path without spaces",
            Self::Scheme => "the URL's scheme is not allowed (scheme): use https",
            Self::Userinfo => "the URL carries a user name or password (userinfo): leave it out",
            Self::Port => "the URL's port is not allowed (port): use the scheme's own port",
            Self::HostForm => {
                "the URL's host is an address in an unusual notation (host_form): write four decimal numbers"
            }
            Self::Dns => "the URL's host has no address (dns): check its name",
            Self::Address => "the URL leads to an address that is not open to clients (address): use a public host",
            Self::Connect => "the URL's host takes no connection (connect): try again, or send the file inline",
            Self::Tls => "no secure connection to the URL's host (tls): check its certificate",
            Self::Protocol => {
                "the URL's host broke off or does not speak HTTP (protocol): try again, or send the file inline"
            }
            Self::Redirect => "the URL redirects too often or to nowhere (redirect): use the final URL",
            Self::Status => "the URL's host answered with an error (status): check that the file is public",
            Self::ContentEncoding => "the file came compressed for transfer (content_encoding): serve it as it is",
            Self::BodyTooLarge => "the file is larger than the limit (body_too_large): send a smaller one",
            Self::Pixels => "the image has more pixels than the limit (pixels): scale it down",
            Self::Timeout => "the file did not arrive in time (timeout): try again, or send it inline",
            Self::Busy => "no room to fetch the file (busy): try again later",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_reads_the_part_and_the_rule_and_no_address() {
        let error = FetchError { cause: Reason::Address, address: Some(([10, 1, 2, 3], 80).into()), status: Some(302) };
        let text = error.at(2).to_string();
        assert!(text.starts_with("media part 2: ") && text.contains("(address)"), "{text}");
        assert!(!text.contains("10.1") && !text.contains("302"), "{text}");
        assert_eq!((error.http_status(), error.reason()), (400, "address"));
        assert_eq!(FetchError::from(Reason::Busy).http_status(), 503);
    }

    #[test]
    fn names_and_labels_agree() {
        for reason in [Reason::HostForm, Reason::Dns, Reason::BodyTooLarge, Reason::ContentEncoding, Reason::BadUrl] {
            let mut label = String::new();
            fovea_service::label::write_snake_case(&reason, &mut label).unwrap();
            assert_eq!(label, reason.name());
            assert!(reason.text().contains(&format!("({})", reason.name())), "{reason}");
        }
    }
}
