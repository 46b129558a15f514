//! From what the entries of `balancers` see to whom to dial and whom to leave.
//!
//! Pure. Each entry is a source of pieces: a name has one, a Kubernetes service one for each EndpointSlice.
//! **Invariant:** an address is dialled as long as any piece of any source has it, and by one stream. Sources never touch each other's pieces.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Most pieces of one source; Kubernetes puts 100 endpoints into each.
const PIECES_MAX: usize = 256;
/// Most addresses of one piece that are looked at.
const ADDRESSES_MAX: usize = 1024;

/// What one entry sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Place in the config's list.
    pub source: usize,
    pub sight: Sight,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// These addresses, and no other.
    All(Vec<SocketAddr>),
    /// A new list begins: what it leaves out is gone when it ends.
    ListBegins,
    /// A piece of a list.
    Listed {
        piece: String,
        addresses: Vec<SocketAddr>,
    },
    ListEnds,
    /// A piece is there, or has changed.
    Applied {
        piece: String,
        addresses: Vec<SocketAddr>,
    },
    Deleted {
        piece: String,
    },
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// `source`: the entry that it comes from.
    Dial {
        address: SocketAddr,
        source: usize,
    },
    HangUp {
        address: SocketAddr,
    },
}

type Pieces = BTreeMap<String, BTreeSet<SocketAddr>>;

#[derive(Debug, Default)]
struct Source {
    pieces: Pieces,
    /// The list that is under way. The old pieces count until it ends.
    listing: Option<Pieces>,
}

/// All sources, and what is dialled.
#[derive(Debug)]
pub struct EndpointSet {
    sources: Vec<Source>,
    dialled: BTreeSet<SocketAddr>,
    dialled_max: usize,
    left_out: usize,
}

impl EndpointSet {
    pub fn new(sources: usize, dialled_max: usize) -> Self {
        let sources = (0..sources).map(|_| Source::default()).collect();
        Self { sources, dialled: BTreeSet::new(), dialled_max, left_out: 0 }
    }

    /// Addresses that find no place under the limit.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Takes a sight; what follows from it, hang-ups first.
    pub fn see(&mut self, seen: Seen) -> Vec<Change> {
        let Some(source) = self.sources.get_mut(seen.source) else { return Vec::new() };
        match seen.sight {
            Sight::All(addresses) => source.pieces = Pieces::from([(String::new(), bounded(addresses))]),
            Sight::ListBegins => source.listing = Some(Pieces::new()),
            Sight::Listed { piece, addresses } => {
                put(source.listing.get_or_insert_default(), piece, addresses);
            }
            Sight::ListEnds => {
                if let Some(listed) = source.listing.take() {
                    source.pieces = listed;
                }
            }
            Sight::Applied { piece, addresses } => put(&mut source.pieces, piece, addresses),
            Sight::Deleted { piece } => drop(source.pieces.remove(&piece)),
        }
        self.settle()
    }

    fn settle(&mut self) -> Vec<Change> {
        let mut wanted = BTreeMap::new();
        for (index, source) in self.sources.iter().enumerate() {
            for address in source.pieces.values().flatten() {
                wanted.entry(*address).or_insert(index);
            }
        }
        let gone: Vec<SocketAddr> =
            self.dialled.iter().filter(|address| !wanted.contains_key(address)).copied().collect();
        let mut changes = Vec::new();
        for address in gone {
            self.dialled.remove(&address);
            changes.push(Change::HangUp { address });
        }
        self.left_out = 0;
        for (address, source) in wanted {
            if self.dialled.contains(&address) {
                continue;
            }
            // Who is dialled keeps its place: a newcomer pushes nobody out.
            if self.dialled.len() >= self.dialled_max {
                self.left_out += 1;
                continue;
            }
            self.dialled.insert(address);
            changes.push(Change::Dial { address, source });
        }
        changes
    }
}

fn bounded(addresses: Vec<SocketAddr>) -> BTreeSet<SocketAddr> {
    addresses.into_iter().take(ADDRESSES_MAX).collect()
}

fn put(pieces: &mut Pieces, piece: String, addresses: Vec<SocketAddr>) {
    if pieces.len() < PIECES_MAX || pieces.contains_key(&piece) {
        pieces.insert(piece, bounded(addresses));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps in words: `0 all 1 2`, `1 apply a 3`, `1 delete a`, `1 begin`, `1 list a 3`, `1 end`; answers `+1 -2`.
    #[track_caller]
    fn check(dialled_max: usize, steps: &[(&str, &str)]) {
        let mut set = EndpointSet::new(2, dialled_max);
        for (step, expect) in steps {
            let words: Vec<&str> = step.split(' ').collect();
            let at = |ports: &[&str]| -> Vec<SocketAddr> {
                ports.iter().map(|port| ([10, 0, 0, 1], port.parse().unwrap()).into()).collect()
            };
            let piece = || words[2].to_owned();
            let sight = match words[1] {
                "all" => Sight::All(at(&words[2..])),
                "begin" => Sight::ListBegins,
                "list" => Sight::Listed { piece: piece(), addresses: at(&words[3..]) },
                "end" => Sight::ListEnds,
                "apply" => Sight::Applied { piece: piece(), addresses: at(&words[3..]) },
                "delete" => Sight::Deleted { piece: piece() },
                other => panic!("{other}"),
            };
            let changes = set.see(Seen { source: words[0].parse().unwrap(), sight });
            let got: Vec<String> = changes
                .iter()
                .map(|change| match change {
                    Change::Dial { address, .. } => format!("+{}", address.port()),
                    Change::HangUp { address } => format!("-{}", address.port()),
                })
                .collect();
            assert_eq!(got.join(" "), *expect, "{step}");
        }
    }

    #[test]
    fn names_replace_what_they_gave_before() {
        check(9, &[("0 all 1 2", "+1 +2"), ("0 all 1 2", ""), ("0 all 2 3", "-1 +3"), ("0 all 3", "-2")]);
    }

    #[test]
    fn slices_are_followed_one_by_one() {
        check(
            9,
            &[
                ("1 apply a 1 2", "+1 +2"),
                ("1 apply b 3", "+3"),
                ("1 apply a 2", "-1"),
                ("1 delete a", "-2"),
                ("1 delete a", ""),
            ],
        );
    }

    #[test]
    fn an_endpoint_that_moves_between_slices_keeps_its_stream() {
        check(9, &[("1 apply a 1 2", "+1 +2"), ("1 apply b 2", ""), ("1 apply a 1", ""), ("1 delete b", "-2")]);
    }

    #[test]
    fn a_new_list_leaves_only_what_it_does_not_name_and_only_at_its_end() {
        check(
            9,
            &[
                ("1 apply a 1", "+1"),
                ("1 apply b 2", "+2"),
                ("1 begin", ""),
                ("1 list b 2 3", ""),
                ("1 end", "-1 +3"),
                // A list that breaks off and begins again counts from its second beginning.
                ("1 begin", ""),
                ("1 list z 9", ""),
                ("1 begin", ""),
                ("1 list b 3", ""),
                ("1 end", "-2"),
                ("1 end", ""),
            ],
        );
    }

    #[test]
    fn an_address_of_two_entries_is_dialled_once_and_kept_while_one_has_it() {
        check(9, &[("0 all 1", "+1"), ("1 apply a 1", ""), ("0 all 2", "+2"), ("1 delete a", "-1")]);
    }

    #[test]
    fn newcomers_push_nobody_out_and_take_places_that_come_free() {
        check(2, &[("0 all 5 6", "+5 +6"), ("0 all 1 5 6", ""), ("0 all 1 6", "-5 +1")]);
    }

    #[test]
    fn a_flood_of_endpoints_is_bounded() {
        let mut set = EndpointSet::new(1, 4);
        for piece in 0..10_000u32 {
            let addresses = (0..4).map(|i| (piece.to_be_bytes(), 1 + i as u16).into()).collect();
            set.see(Seen { source: 0, sight: Sight::Applied { piece: piece.to_string(), addresses } });
        }
        assert_eq!((set.dialled.len(), set.left_out()), (4, PIECES_MAX * 4 - 4));
    }
}
