// SPDX-License-Identifier: Apache-2.0

// Package gangs decides when the claims of a gang may tell the scheduler that their Ports are up. A
// gang is the pods of a PodGroup whose policy is gang (KEP-4671). The scheduler places a gang as a
// whole, but binds each of its pods by itself. Therefore the claims of a gang report together.
package gangs
