// Package source says what the administrator declared: DevicePools from a file, from the API server, or from both.
package source
