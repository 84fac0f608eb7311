//! Admission: nothing enters that displaces more demand than it brings (I4).

/// What becomes of bytes that were just fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Keep them; there is room.
    Keep,
    /// Keep them in the victim's place.
    Replace,
    /// Serve them and let them go.
    Bypass,
}

/// Decides for a chunk of `bytes` and its demand, when `free` bytes are free and the next victim
/// has `victim` demand (`None`: nothing may leave). Equal demand stays: who came first is as
/// good, and nothing is written.
#[must_use]
pub fn admit(bytes: u64, demand: f64, free: u64, victim: Option<f64>) -> Admission {
    match victim {
        _ if bytes <= free => Admission::Keep,
        Some(v) if demand > v => Admission::Replace,
        _ => Admission::Bypass,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_displaces_more_than_it_brings() {
        assert_eq!(admit(4, 0.0, 4, None), Admission::Keep);
        assert_eq!(admit(4, 2.0, 3, Some(1.0)), Admission::Replace);
        assert_eq!(admit(4, 1.0, 3, Some(1.0)), Admission::Bypass);
        assert_eq!(admit(4, 9.0, 3, None), Admission::Bypass);
        assert_eq!(admit(4, f64::NAN, 3, Some(1.0)), Admission::Bypass);
    }
}
