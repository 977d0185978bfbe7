package devlink

// What the tests decode.
var (
	Parse          = parse
	DecodePort     = decodePort
	DecodeReporter = decodeReporter
	DecodeRate     = decodeRate
)

// FollowWatch is how a watch is begun again.
var FollowWatch = follow
