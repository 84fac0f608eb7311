//! Sizes and durations in the form that people write: `200GiB`, `64MB`, `1048576`, `30s`, `2m`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The text is not a size, an amount or a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The text is not a number of bytes.
    #[error("{0:?} is not a size; write a number with a unit, such as 200GiB, 64MB or 1048576")]
    Size(String),
    /// The text is neither a number of bytes nor a percentage.
    #[error("{0:?} is neither a size nor a percentage; write a value such as 200GiB or 50%")]
    Amount(String),
    /// The text is not a duration.
    #[error("{0:?} is not a duration; write a number with a unit, such as 250ms, 30s or 2m")]
    Duration(String),
}

/// A number of bytes.
///
/// `KiB MiB GiB TiB`, or `Ki Mi Gi Ti`, are powers of 1024, `kB MB GB TB` are powers of 1000, and a number
/// without a unit is bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

/// A number of bytes, or a percentage of a whole: `200GiB`, `50%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// A number of bytes.
    Bytes(u64),
    /// A percentage, at most 100.
    Percent(u8),
}

impl Amount {
    /// Returns the number of bytes, given the bytes of the whole.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        match self {
            Amount::Bytes(n) => n,
            Amount::Percent(p) => u64::try_from(u128::from(whole) * u128::from(p) / 100).unwrap_or(whole),
        }
    }
}

impl FromStr for Amount {
    type Err = UnitError;

    fn from_str(s: &str) -> Result<Self, UnitError> {
        let not = || UnitError::Amount(s.to_owned());
        match s.trim().strip_suffix('%') {
            Some(p) => p.trim_end().parse().ok().filter(|p| *p <= 100).map(Amount::Percent).ok_or_else(not),
            None => s.parse::<ByteSize>().map(|b| Amount::Bytes(b.0)).map_err(|_| not()),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Bytes(n) => ByteSize(*n).fmt(f),
            Amount::Percent(p) => write!(f, "{p}%"),
        }
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(u64),
            Text(String),
        }
        match Either::deserialize(d)? {
            Either::Number(n) => Ok(Amount::Bytes(n)),
            Either::Text(s) => s.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A duration, written with a unit (`30s`, `2m`, `1h 30m`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(pub Duration);

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(s: &str) -> Result<Self, UnitError> {
        let text = s.trim();
        // The library parses through f64, which rounds above 2^53. So an integer is parsed here.
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return text.parse().map(ByteSize).map_err(|_| UnitError::Size(s.to_owned()));
        }
        if !text.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
            return Err(UnitError::Size(s.to_owned()));
        }
        text.parse::<bytesize::ByteSize>()
            .map(|b| ByteSize(b.as_u64()))
            .map_err(|_| UnitError::Size(s.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    /// Writes the shortest exact form, with the largest power of 1024 that divides the number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(s: &str) -> Result<Self, UnitError> {
        humantime::parse_duration(s.trim()).map(Span).map_err(|_| UnitError::Duration(s.to_owned()))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"200GiB\", \"64MB\" or 1048576")
            }

            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<ByteSize, E> {
                v.parse().map_err(E::custom)
            }

            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(v))
            }

            fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<ByteSize, E> {
                u64::try_from(v).map(ByteSize).map_err(|_| E::custom("a size is not negative"))
            }
        }
        d.deserialize_any(Visitor)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Span;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration with its unit, such as \"30s\" or \"2m\"")
            }

            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Span, E> {
                v.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_bytes_or_percents() {
        for (text, of, back) in
            [("200GiB", 200 << 30, "200GiB"), ("50%", 500, "50%"), (" 5 %", 50, "5%"), ("0", 0, "0")]
        {
            let amount: Amount = text.parse().expect("an amount");
            assert_eq!((amount.of(1000), amount.to_string().as_str()), (of, back));
        }
        assert_eq!(Amount::Percent(100).of(u64::MAX), u64::MAX);
        for wrong in ["101%", "-1%", "%", "many", "1.5%"] {
            assert!(wrong.parse::<Amount>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_read_and_written_exactly() {
        for (text, bytes) in [
            ("200GiB", 200u64 << 30),
            // As Kubernetes writes quantities: the chart's values have this one notation.
            ("200Gi", 200u64 << 30),
            ("64Mi", 64 << 20),
            ("5Ti", 5 << 40),
            ("7Ki", 7 << 10),
            ("64MB", 64_000_000),
            ("1048576", 1 << 20),
            ("1.5 KiB", 1536),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for bytes in [0, 1, 1000, 1023, 1024, 64_000_000, 200 << 30, u64::MAX] {
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
        assert_eq!(ByteSize(200 << 30).to_string(), "200GiB");
        for bad in ["", "-1", "lots", "GiB", "1 furlong", "99999999999999999999"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!("30s".parse(), Ok(Span(Duration::from_secs(30))));
        assert_eq!("2m".parse(), Ok(Span(Duration::from_secs(120))));
        assert_eq!("250ms".parse(), Ok(Span(Duration::from_millis(250))));
        for bad in ["30", "", "-1s", "soon"] {
            assert!(bad.parse::<Span>().is_err(), "{bad:?}");
        }
        let span = Span(Duration::from_secs(5400));
        assert_eq!(span.to_string().parse(), Ok(span));
    }
}
