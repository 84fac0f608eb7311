//! Demand: Σ over epochs of benefit × what is still needed. It ranks datasets for capacity, and
//! chunks for admission and prefetch; inside a dataset the victim follows its order
//! ([`super::eviction`]).

/// One epoch's claim on some bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    /// What a cached byte is worth to the job, in seconds saved per byte (≥ 0); 1 until it is
    /// measured.
    pub benefit: f64,
    /// Bytes the epoch still needs of them.
    pub needed: u64,
    /// What remains of the epoch, as a part of it: what is needed soon counts for more.
    pub left: f64,
}

/// The demand for a chunk or a dataset. A claim that is not a number counts for nothing.
#[must_use]
pub fn demand(claims: impl IntoIterator<Item = Claim>) -> f64 {
    claims
        .into_iter()
        .map(|c| c.benefit.max(0.0) * c.needed as f64 / c.left.clamp(0.01, 1.0))
        .filter(|d| d.is_finite())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_adds_up_and_survives_nonsense() {
        let c = Claim { benefit: 2.0, needed: 10, left: 1.0 };
        assert_eq!(demand([c]), 20.0);
        assert_eq!(demand([c, c]), 40.0);
        assert_eq!(demand([Claim { left: 0.5, ..c }]), 40.0);
        assert_eq!(demand([Claim { benefit: f64::NAN, ..c }, Claim { benefit: -1.0, ..c }]), 0.0);
        assert_eq!(demand([]), 0.0);
    }
}
