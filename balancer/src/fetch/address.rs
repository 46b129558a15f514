//! Which addresses may be dialled: everything public, and what the operator opened.
//!
//! **Invariant:** the most specific entry decides, so that opening a wide network never opens what is refused by name inside it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Not for clients, by the IANA special-purpose registries of June 2026, and clouds' own service addresses.
/// Forms that carry an IPv4 address inside are refused as a whole; one that is opened has its inner address checked too.
const REFUSED: &[&str] = &[
    "0.0.0.0/8",          // this host
    "10.0.0.0/8",         // private
    "100.64.0.0/10",      // carrier NAT
    "100.100.100.200/32", // metadata, Alibaba
    "127.0.0.0/8",        // loopback
    "168.63.129.16/32",   // metadata, Azure
    "169.254.0.0/16",     // link-local
    "169.254.169.254/32", // metadata
    "172.16.0.0/12",      // private
    "192.0.0.0/24",       // protocol assignments
    "192.0.0.192/32",     // metadata, Oracle
    "192.0.2.0/24",       // documentation
    "192.88.99.0/24",     // 6to4 relays
    "192.168.0.0/16",     // private
    "198.18.0.0/15",      // benchmarks
    "198.51.100.0/24",    // documentation
    "203.0.113.0/24",     // documentation
    "224.0.0.0/4",        // multicast
    "240.0.0.0/4",        // reserved, broadcast
    "::/3",               // all outside 2000::/3: unspecified, loopback, IPv4-compatible, discard
    "::ffff:0:0/96",      // IPv4-mapped
    "64:ff9b::/96",       // NAT64
    "4000::/2",           // reserved, segment routing
    "8000::/1",           // reserved, unique local, link-local, site-local, multicast
    "2001::/23",          // protocol assignments: Teredo, benchmarks, identifiers
    "2001:db8::/32",      // documentation
    "2002::/16",          // 6to4
    "3fff::/20",          // documentation
    "fd00:ec2::254/128",  // metadata, AWS
    "fd20:ce::254/128",   // metadata, Google
    "fd00:42::42/128",    // metadata, Scaleway
];

struct Rule {
    net: IpNet,
    allow: bool,
    /// Among entries of equal length: built in, then opened, then closed by the operator.
    rank: u8,
}

pub(super) struct Addresses(Vec<Rule>);

impl Addresses {
    pub fn new(allow: &[IpNet], deny: &[IpNet]) -> Self {
        let built_in = REFUSED.iter().map(|net| Rule {
            net: net.parse().expect("every line of the table is a network, held by a test"),
            allow: false,
            rank: 0,
        });
        let allow = allow.iter().map(|net| Rule { net: *net, allow: true, rank: 1 });
        let deny = deny.iter().map(|net| Rule { net: *net, allow: false, rank: 2 });
        Self(built_in.chain(allow).chain(deny).collect())
    }

    /// The address itself, and every IPv4 address that it stands for.
    pub fn allows(&self, address: IpAddr) -> bool {
        let inner = match address {
            IpAddr::V4(_) => [None, None],
            IpAddr::V6(address) => carried(address),
        };
        self.open(address) && inner.into_iter().flatten().all(|inner| self.open(inner.into()))
    }

    fn open(&self, address: IpAddr) -> bool {
        let matching = self.0.iter().filter(|rule| rule.net.contains(&address));
        matching.max_by_key(|rule| (rule.net.prefix_len(), rule.rank)).is_none_or(|rule| rule.allow)
    }
}

/// IPv4 addresses that packets to an IPv6 address may end at.
fn carried(address: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| Some(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    match (a, b) {
        // `::` and `::1` are themselves.
        (0, 0) if g == 0 && h <= 1 => [None, None],
        // Compatible, mapped and translated; NAT64, well-known and local.
        (0, 0) | (0x64, 0xff9b) => [v4(g, h), None],
        // 6to4.
        (0x2002, _) => [v4(b, c), None],
        // Teredo: server, and the client's address inverted.
        (0x2001, 0) => [v4(c, d), v4(!g, !h)],
        // ISATAP.
        _ if matches!(e, 0 | 0x200) && f == 0x5efe => [v4(g, h), None],
        _ => [None, None],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[track_caller]
    fn check(allow: &[&str], deny: &[&str], open: &[&str], refused: &[&str]) {
        let addresses = Addresses::new(&nets(allow), &nets(deny));
        for (list, expect) in [(open, true), (refused, false)] {
            for address in list {
                assert_eq!(addresses.allows(address.parse().unwrap()), expect, "{address}");
            }
        }
    }

    #[test]
    fn public_addresses_are_open_and_all_others_refused() {
        let open = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.63.255.255", "2606:4700::1111", "2a00:1450:4001::1"];
        let refused = [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.19.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::ffff:0:127.0.0.1",
            "100::1",
            "64:ff9b::10.0.0.1",
            "64:ff9b::8.8.8.8",
            "64:ff9b:1::1",
            "2001::1",
            "2001:2::1",
            "2001:20::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:808:808::",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "4000::1",
            "2606:4700::5efe:10.0.0.1",
        ];
        check(&[], &[], &open, &refused);
    }

    #[test]
    fn the_most_specific_entry_decides() {
        check(&["127.0.0.0/8"], &[], &["127.0.0.1"], &["10.0.0.1", "::ffff:127.0.0.1", "::1"]);
        check(&["10.0.0.0/8"], &["10.1.0.0/16"], &["10.2.0.1"], &["10.1.0.1"]);
        check(&["8.8.0.0/16"], &["0.0.0.0/0"], &["8.8.8.8"], &["1.1.1.1"]);
        check(&["8.8.8.0/24"], &["8.8.8.0/24"], &[], &["8.8.8.8"]);
        check(&["::1/128"], &[], &["::1"], &["::", "::2"]);
    }

    #[test]
    fn a_wide_opening_leaves_metadata_closed_and_a_narrow_one_opens_it() {
        check(
            &["0.0.0.0/0", "::/0", "169.254.0.0/16", "fd00::/8"],
            &[],
            &["169.254.1.1"],
            &["169.254.169.254", "fd00:ec2::254", "10.0.0.1"],
        );
        check(&["169.254.169.254/32"], &[], &["169.254.169.254"], &["169.254.169.253"]);
    }

    #[test]
    fn an_opened_form_has_its_inner_address_checked() {
        let forms = ["64:ff9b::/96", "2002::/16", "2001::/32", "::ffff:0:0/96"];
        let open = ["64:ff9b::8.8.8.8", "2002:808:808::1", "::ffff:8.8.8.8", "2001:0:808:808:0:0:f7f7:f7f7"];
        let refused = [
            "64:ff9b::169.254.169.254",
            "2002:a00:1::1",
            "::ffff:127.0.0.1",
            "2001:0:808:808:0:0:80ff:fffe",
            "2001:0:a00:1:0:0:f7f7:f7f7",
        ];
        check(&forms, &[], &open, &refused);
    }
}
