//! Which chunk of a dataset leaves is the rule of its order (DESIGN §2): sweep age and never the
//! reserve (`substitute`: [`crate::order::Flywheel`] says so itself), furthest next use
//! (`strict`), none (plain readers: their share moves only by allocation).

/// The victim under a strict order: of `(chunk, position of its next use)`, the one used last;
/// one without a next use goes first. Ties go to the lowest chunk, so that everyone agrees.
#[must_use]
pub fn furthest<C: Copy + Ord>(candidates: impl IntoIterator<Item = (C, Option<u64>)>) -> Option<C> {
    candidates
        .into_iter()
        .max_by_key(|&(chunk, next)| (next.unwrap_or(u64::MAX), std::cmp::Reverse(chunk)))
        .map(|c| c.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_furthest_next_use_leaves() {
        assert_eq!(furthest([(1, Some(5)), (2, Some(9)), (3, Some(7))]), Some(2));
        assert_eq!(furthest([(1, Some(5)), (2, None), (0, None)]), Some(0));
        assert_eq!(furthest::<u32>([]), None);
    }
}
