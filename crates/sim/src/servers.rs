//! The servers of a case: who keeps which unit, who is gone, and what is known of it.
//!
//! Units are placed by `fletch_core::cluster::placement`, and what all of them hold is their residencies
//! merged, as in a real cluster. A unit whose owner is full or away goes to the next in its ranking: who
//! grants knows where everything is, and leases name it. A server that is gone has lost everything, and until
//! the news of it has spread what it held is believed to be there.

use crate::{Case, net::Way};
use fletch_core::{
    Domain, Hash, StoreKey,
    cluster::{Member, Placement},
    plan::Bits,
    residency::Residency,
};

/// Not held by anyone.
const NOBODY: u16 = u16::MAX;

/// Something that happens to a server.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Change {
    /// It is gone, with all it held.
    Dies(usize),
    /// It is back, empty.
    Returns(usize),
    /// The others know how it is.
    Announced(usize),
}

impl Change {
    /// Of what is at one time the least is first: a server is back before it goes again, and what happens happens
    /// before it is known.
    fn rank(self) -> u8 {
        match self {
            Change::Returns(_) => 0,
            Change::Dies(_) => 1,
            Change::Announced(_) => 2,
        }
    }
}

/// What came of the changes up to now.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// Units that vanished.
    pub vanished: Vec<u32>,
    /// Whether something became known: then residencies are worth comparing.
    pub known: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Servers {
    sizes: Vec<u32>,
    capacity: Vec<u64>,
    used: Vec<u64>,
    ways: Vec<Way>,
    up: Vec<bool>,
    believed: Vec<bool>,
    /// Of each unit: servers by preference (none of a lone one), and who holds it.
    ranking: Vec<Vec<u16>>,
    holder: Vec<u16>,
    /// What is still to happen, latest first.
    changes: Vec<(f64, Change)>,
}

impl Servers {
    pub(crate) fn new(case: &Case) -> Self {
        let weights: Vec<f64> =
            if case.servers.is_empty() { vec![1.0] } else { case.servers.iter().map(|s| s.weight).collect() };
        let sum: f64 = weights.iter().sum();
        let member = |(i, &weight): (usize, &f64)| Member { id: i.to_string(), weight };
        let placement = Placement::new(weights.iter().enumerate().map(member));
        let domain = Domain::default_domain();
        let rank = |unit: u64| -> Vec<u16> {
            let hash = Hash::of(&[case.seed.to_le_bytes(), unit.to_le_bytes()].concat());
            let key = StoreKey { domain: domain.clone(), hash };
            placement.owners(&key, weights.len()).iter().filter_map(|m| m.id.parse().ok()).collect()
        };
        let mut changes: Vec<(f64, Change)> = Vec::new();
        for (i, s) in case.servers.iter().enumerate() {
            for &(from, to) in &s.gone {
                for (at, change) in [(from, Change::Dies(i)), (to, Change::Returns(i))] {
                    changes.extend([(at, change), (at + case.news, Change::Announced(i))]);
                }
            }
        }
        changes.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.rank().cmp(&a.1.rank())));
        let total = case.capacity();
        Servers {
            sizes: case.units.clone(),
            // A lone server has all of it, whatever rounding does.
            capacity: weights.iter().map(|w| (total as f64 * (w / sum)) as u64).collect(),
            used: vec![0; weights.len()],
            ways: vec![Way::new(case.network); weights.len()],
            up: vec![true; weights.len()],
            believed: vec![true; weights.len()],
            ranking: if weights.len() > 1 {
                (0..case.units.len() as u64).map(rank).collect()
            } else {
                Vec::new()
            },
            holder: vec![NOBODY; case.units.len()],
            changes,
        }
    }

    /// The first in a unit's ranking that is up, and has `room`.
    fn owner(&self, unit: u32, room: u64) -> Option<usize> {
        let fits = |&s: &usize| self.up[s] && self.used[s] + room <= self.capacity[s];
        match self.ranking.get(unit as usize) {
            None => Some(0).filter(fits),
            Some(ranked) => ranked.iter().map(|&s| usize::from(s)).find(fits),
        }
    }

    /// What may be kept by those that are believed to be there: of several, each leaves room for a unit, so
    /// that there is always one that takes the next.
    pub(crate) fn capacity(&self) -> u64 {
        let spare = match self.capacity.len() {
            1 => 0,
            _ => self.sizes.iter().copied().max().map_or(0, u64::from),
        };
        let believed = self.capacity.iter().zip(&self.believed).filter(|x| *x.1);
        believed.map(|(c, _)| c.saturating_sub(spare)).sum()
    }

    /// Everything that happened until `now`.
    pub(crate) fn until(&mut self, now: f64) -> News {
        let mut news = News::default();
        while let Some(&(at, change)) = self.changes.last().filter(|c| c.0 <= now) {
            debug_assert!(at <= now);
            self.changes.pop();
            match change {
                Change::Dies(s) => {
                    self.up[s] = false;
                    self.used[s] = 0;
                    for (unit, holder) in (0u32..).zip(&mut self.holder) {
                        if usize::from(*holder) == s {
                            *holder = NOBODY;
                            news.vanished.push(unit);
                        }
                    }
                }
                Change::Returns(s) => self.up[s] = true,
                Change::Announced(s) => {
                    self.believed[s] = self.up[s];
                    news.known = true;
                }
            }
        }
        news
    }

    /// Someone keeps a unit from now on; `false` when nobody has room.
    pub(crate) fn keep(&mut self, unit: u32) -> bool {
        let size = u64::from(self.sizes[unit as usize]);
        let Some(s) = self.owner(unit, size) else { return false };
        self.used[s] += size;
        self.holder[unit as usize] = u16::try_from(s).unwrap_or(NOBODY);
        true
    }

    /// A unit leaves whoever holds it; whether anyone did.
    pub(crate) fn release(&mut self, unit: u32) -> bool {
        let holder = std::mem::replace(&mut self.holder[unit as usize], NOBODY);
        if holder == NOBODY {
            return false;
        }
        self.used[usize::from(holder)] -= u64::from(self.sizes[unit as usize]);
        true
    }

    /// When a sample of a unit is at its job.
    pub(crate) fn deliver(&mut self, unit: u32, now: f64, there: f64) -> f64 {
        let s = match self.holder[unit as usize] {
            NOBODY => self.owner(unit, 0).unwrap_or(0),
            s => usize::from(s),
        };
        self.ways[s].deliver(now, there)
    }

    /// What all of them hold: each one's residency, merged.
    pub(crate) fn residency(&self) -> Residency {
        let units = self.holder.len() as u64;
        let one = |s: usize| {
            let mut held = Bits::zeros(units);
            for (u, &h) in (0u64..).zip(&self.holder) {
                if usize::from(h) == s {
                    held.set(u);
                }
            }
            Residency::new(1, held)
        };
        let all = (0..self.up.len()).map(one).reduce(|a, b| a.merged(&b));
        all.unwrap_or_else(|| Residency::new(0, Bits::zeros(units)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is believed when all news are out is what is so, in whatever order spans are written.
    #[test]
    fn what_happened_is_known_rightly() {
        for news in [0.0, 1.0] {
            let mut case = Case::plain("x", 8, 4, 0.5, false, &[1.0], 1);
            case.news = news;
            let server = |gone: &[(f64, f64)]| crate::Server { weight: 1.0, gone: gone.to_vec() };
            case.servers = vec![server(&[]), server(&[(20.0, 30.0), (10.0, 20.0)])];
            let mut servers = Servers::new(&case);
            for (now, up) in [(9.0, true), (11.0, false), (21.0, false), (31.0, true)] {
                servers.until(now);
                assert_eq!((servers.up[1], servers.believed[1]), (up, up), "news {news}, at {now}");
            }
            assert!(servers.changes.is_empty());
        }
    }
}
